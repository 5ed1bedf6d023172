"""Length shaping: the soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4)."""
from collections.abc import Callable
from typing import Any

from jaxrl_llm.tools.registry import one_of


def soft_overlong(max_length: int, cache: int, factor: float = 1.0, variant: str = "paper") -> Callable[[Any], Any]:
    """Penalty of completion lengths in tokens (integers of any shape, of NumPy or JAX); edge = max_length - cache.

    "paper": 0 up to the edge, (edge - length) / cache up to max_length, -1 beyond (equation 13); times `factor`.
    "code": min(-(length - edge) / cache * factor, 0), as released: the same up to max_length, unbounded beyond.
    Raises ValueError unless 0 < cache <= max_length.
    """
    one_of("soft_overlong variant", variant, ("paper", "code"))
    if not 0 < cache <= max_length:
        raise ValueError(f"soft overlong punishment has cache={cache}, max_length={max_length}; need 0 < cache <= max_length")

    def penalty(lengths):
        excess = (lengths - (max_length - cache)).clip(0, cache if variant == "paper" else None)
        return -factor * excess / cache

    return penalty

"""Length shaping: the soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4)."""

from collections.abc import Callable

import numpy as np

from jaxrl_llm.registry import one_of


def soft_overlong(max_length: int, cache: int, factor: float, variant: str) -> Callable[[np.ndarray], np.ndarray]:
    """Penalty f32[N] of completion lengths i32[N] in tokens, to be added to the reward; edge = max_length - cache.

    "paper": 0 up to the edge, (edge - length) / cache up to max_length, -1 beyond (equation 13); times `factor`.
    "code": min(-(length - edge) / cache * factor, 0), as released: the same up to max_length, unbounded beyond.
    Raises ValueError unless 0 < cache <= max_length.
    """
    one_of("soft_overlong variant", variant, ("paper", "code"))
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache}, max_length={max_length}; need 0 < cache <= max_length")

    def penalty(lengths: np.ndarray) -> np.ndarray:
        ramp = np.minimum(-(np.asarray(lengths, np.float64) - (max_length - cache)) / cache, 0.0)
        return factor * (np.maximum(ramp, -1.0) if variant == "paper" else ramp)

    return penalty

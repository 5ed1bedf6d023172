"""DAPO's soft overlong punishment under its own name; `objectives.dapo_overlong` is the filter (arXiv 2503.14476)."""

from jaxrl_llm.advantages.base import Estimator, estimator
from jaxrl_llm.advantages.dapo import dapo


@estimator
def dapo_overlong(
    *,
    max_len: int = 20480,
    cache_len: int | None = None,
    factor: float = 1.0,
    variant: str = "paper",
    eps: float = 1e-6,
) -> Estimator:
    """Group z-score of `r + penalty(length)`: the estimator `dapo`, with correctness as rewards +1 and -1.

    Do not combine it with the objective of this name, which removes the same rollouts from the loss. The numbers
    are those of `dapo`.
    """
    return dapo(max_len=max_len, cache_len=cache_len, factor=factor, variant=variant, eps=eps)

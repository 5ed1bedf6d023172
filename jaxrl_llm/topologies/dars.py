"""DARS: extra rollouts for hard prompts until their advantages sum to those of half-solved ones (arXiv 2508.13755)."""
import numpy as np

from jaxrl_llm.tools import registry
from jaxrl_llm.topologies.rules import Rule, rule, success

WEIGHTINGS = ("equal", "hardness")


def extra_rollouts(success_P: np.ndarray, first: int, most: int, *, weighting: str = "equal", use_std: bool = False
                   ) -> np.ndarray:
    """i64[P]: rollouts beyond the `first`, at most `most - first`: `ceil((target - first S(u)) / S(u))` where u < 1/2, else 0.

    u is the success rate of the first rollouts, or `0.5 / first` if that is 0. `S(u) = 2 u (1 - u)` is the expected |A| of a
    rollout, with `use_std` `2 sqrt(u (1 - u))`. The target is `first S(1/2)`, with `weighting="hardness"` times `2 (1 - u)`.
    Raises ValueError for another weighting.
    """
    registry.one_of("weighting", weighting, WEIGHTINGS)
    u = np.where(success_P <= 1e-6, 0.5 / first, np.asarray(success_P, np.float64))
    signal = 2 * (np.sqrt(u * (1 - u)) if use_std else u * (1 - u))
    target = first * (1.0 if use_std else 0.5) * (2 * (1 - u) if weighting == "hardness" else 1)
    hard = u < 0.5
    wanted = np.ceil((target - first * signal) / np.where(hard, signal, 1) - 1e-9)  # a mathematical integer stays one
    return np.where(hard, np.clip(wanted, 0, most - first), 0).astype(np.int64)


@rule
def dars(*, weighting: str = "equal", use_std: bool = False, upper: float = 1.0) -> Rule:
    """`extra_rollouts` once, after the first group; prompts with a success rate above 0 and below `upper` are trained on.

    The other prompts, such as those without a success or without a failure, leave the batch and are not replaced.
    """
    registry.one_of("weighting", weighting, WEIGHTINGS)

    def more(rewards, valid, first, most):
        if (valid.sum(1) > first).any():  # the second stage is over
            return np.zeros(len(valid), np.int64)
        return extra_rollouts(success(rewards, valid), first, most, weighting=weighting, use_std=use_std)

    def keep(rewards, valid):
        rate = success(rewards, valid)
        return (rate > 0) & (rate < upper)

    return Rule(more, keep, solved=True)

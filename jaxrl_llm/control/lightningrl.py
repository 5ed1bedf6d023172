"""LightningRL's filter: a prompt needs a right answer and a spread in efficiency (SJTU-DENG-Lab/LightningRL)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def accuracy(rollouts: Rollouts) -> Array:
    """f32[P, G]: 1 where `Rollouts.correct`, but 0 where `extras["truncated"]`: truncated rollouts count as wrong."""
    return (rollouts.correct & ~rollouts.extras["truncated"].astype(bool)).astype(rollouts.rewards.dtype)


def efficiency(rollouts: Rollouts, measure: str) -> Array:
    """f32[P, G]: `extras["perf"]`, or for `measure="length"` minus the number of tokens."""
    return rollouts.extras["perf"] if measure == "perf" else -rollouts.lengths.astype(rollouts.rewards.dtype)


def has_signal(accuracy_PG: Array, perf_PG: Array, valid_PG: Array, *, min_range: float = 0.01) -> Array:
    """bool[P]: some valid rollout is right, and the largest and smallest `perf` differ by at least `min_range`."""
    solved = masked.max(accuracy_PG, valid_PG, axis=1, initial=0) > 0
    spread = masked.max(perf_PG, valid_PG, axis=1, initial=-float("inf")) + masked.max(
        -perf_PG, valid_PG, axis=1, initial=-float("inf"))
    return solved & (spread >= min_range - 1e-6)


@prompt_filter
def lightningrl(*, perf: str = "length", min_range: float = 0.01) -> Filter:
    """Prompts with a right answer and a spread of `efficiency` (`perf="length"` or `"perf"`), see `has_signal`."""
    registry.one_of("perf", perf, ("perf", "length"))

    def keep(rollouts):
        return has_signal(accuracy(rollouts), efficiency(rollouts, perf), rollouts.valid, min_range=min_range)

    return Filter(keep, needs=("rewards", "truncated", "perf") if perf == "perf" else ("rewards", "truncated"))

"""DAPO's dynamic sampling: train only on prompts whose rollouts disagree (arXiv 2503.14476)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


def informative(accuracy_PG: Array, valid_PG: Array) -> Array:
    """bool[P]: prompts whose valid rollouts do not all have the same (unshaped) accuracy; a single rollout is kept.

    A prompt without valid rollouts is dropped.
    """
    n = masked.count(valid_PG, axis=1)
    disagree = masked.std(accuracy_PG, valid_PG, axis=1, ddof=0) > 0
    return (n == 1) | disagree


@prompt_filter
def dynamic_sampling() -> Filter:
    """Prompts with both right and wrong rollouts, by the unshaped `Rollouts.score`; see `informative`."""
    return Filter(lambda rollouts: informative(rollouts.score, rollouts.valid))

"""MARS^2's filter: keep search trees that are neither hopeless nor solved (arXiv 2604.14564)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


def undecided(scores_PG: Array, valid_PG: Array) -> Array:
    """bool[P]: the mean of the raw scores, which are in [0, 1], is neither 0 nor 1."""
    mean = masked.mean(scores_PG, valid_PG, axis=1)
    return (mean > 0) & (mean < 1)


@prompt_filter
def mars2_path_adv() -> Filter:
    """Trees that are `undecided` by `Rollouts.score`."""
    return Filter(lambda rollouts: undecided(rollouts.score, rollouts.valid))

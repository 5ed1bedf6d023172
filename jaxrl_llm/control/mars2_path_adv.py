"""MARS^2's filter: keep search trees that are neither hopeless nor solved (arXiv 2604.14564)."""

from jax import Array

from jaxrl_llm import masked


def undecided(scores_PG: Array, valid_PG: Array) -> Array:
    """bool[P]: the mean of the raw scores, which are in [0, 1], is neither 0 nor 1."""
    mean = masked.mean(scores_PG, valid_PG, axis=1)
    return (mean > 0) & (mean < 1)

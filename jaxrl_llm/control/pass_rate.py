"""Leaving solved prompts out of later epochs (ScaleRL, arXiv 2510.13786; RAPO, arXiv 2509.24107)."""

import jax.numpy as jnp
from jax import Array


def unsolved(pass_rate_P: Array, *, cut: float = 0.9, at_least: int = 0) -> Array:
    """bool[P]: prompts with a pass rate below `cut`, and those never tried (NaN).

    If fewer than `at_least` remain, the hardest of the solved ones fill up (ties: the first).
    """
    rate = jnp.where(jnp.isnan(pass_rate_P), -jnp.inf, pass_rate_P)
    rank = jnp.argsort(jnp.argsort(rate, stable=True))
    return (rate < cut) | (rank < at_least)

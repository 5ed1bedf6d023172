"""SwS: problems that a policy fails to learn, and their domains (arXiv 2506.08989)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


class Trends(NamedTuple):
    """For each of N problems: visits, mean accuracy, sum of `(t - mean t) accuracy` over visits, best accuracy; its domain.

    All are f32[N] except `visits` and `domain` i32[N]; `phase` of the run from 0, i32[].
    """

    visits: Array
    mean: Array
    product: Array
    best: Array
    domain: Array
    phase: Array


def slope(trends: Trends) -> Array:
    """f32[N]: slope of the least-squares line of a problem's accuracies over its visits; 0 with fewer than two visits."""
    n = trends.visits.astype(jnp.float32)
    squares = n * (n**2 - 1) / 12  # sum of (t - mean t)^2, t = 0 .. n - 1
    return jnp.where(n > 1, trends.product / jnp.where(n > 1, squares, 1), 0)


def visited(trends: Trends, tried_N: Array, right_N: Array) -> Trends:
    """The trends with one more visit of each tried problem; the update needs no history."""
    seen, n = tried_N > 0, trends.visits.astype(jnp.float32)
    accuracy = right_N / jnp.maximum(tried_N, 1)
    off = jnp.where(seen, accuracy - trends.mean, 0)
    # sum over t < n of (t - mean t) a, when t = n joins: the mean of t moves by 1/2, the new one is n / 2 above it
    product = trends.product + jnp.where(seen, off * n / 2, 0)
    best = jnp.where(seen, jnp.maximum(trends.best, accuracy), trends.best)
    return trends._replace(visits=trends.visits + seen, mean=trends.mean + off / (n + 1), product=product, best=best)


def weak(trends: Trends, *, threshold: float = 0.5) -> Array:
    """bool[N]: problems whose accuracy never reached `threshold` and is falling."""
    return (trends.best < threshold) & (slope(trends) < -1e-6) & (trends.visits > 1)


@prompt_filter
def sws(*, low: float = 0.125, high: float = 0.875) -> Filter:
    """Prompts whose share of right rollouts is in [low, high]."""
    def keep(rollouts):
        accuracy = masked.mean(rollouts.correct.astype(jnp.float32), rollouts.valid, axis=1)
        return jnp.any(rollouts.valid, axis=1) & (low - 1e-6 <= accuracy) & (accuracy <= high + 1e-6)

    return Filter(keep)

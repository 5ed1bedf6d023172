"""SwS: problems that a policy fails to learn, and their domains (arXiv 2506.08989)."""
from typing import NamedTuple

import jax
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


def failure_rates(weak_N: Array, domain_N: Array, domains: int) -> Array:
    """f32[D]: the share of weak problems of each domain."""
    inside = domain_N == jnp.arange(domains)[:, None]
    return masked.mean(jnp.broadcast_to(weak_N.astype(jnp.float32), inside.shape), inside, axis=1)


def domain_budgets(rates_D: Array, total: int) -> Array:
    """i32[D]: new problems for each domain, `floor(total rate / sum of rates)`; 0 if no problem is weak."""
    whole = jnp.sum(rates_D)
    return jnp.floor(total * rates_D / jnp.where(whole > 0, whole, 1) + 1e-4).astype(jnp.int32)


def next_concept(chosen_C: Array, counts_CC: Array, embeddings_CD: Array, frequency_C: Array, *, temperature: float = 0.2
                 ) -> Array:
    """f32[C], summing to 1: probabilities of the next concept of a set, given the concepts `chosen_C` bool[C].

    The first concept is drawn in proportion to `frequency_C`, a later one by `softmax((co-occurrences with the chosen + cosine
    with their mean embedding) / temperature)` without the chosen; `embeddings_CD` have length 1.
    """
    mean = masked.mean(embeddings_CD, jnp.broadcast_to(chosen_C[:, None], embeddings_CD.shape), axis=0)
    length = jnp.linalg.norm(mean)
    score = counts_CC @ chosen_C.astype(counts_CC.dtype) + embeddings_CD @ (mean / jnp.where(length > 0, length, 1))
    later = jax.nn.softmax(jnp.where(chosen_C, -jnp.inf, score / temperature))
    return jnp.where(jnp.any(chosen_C), later, frequency_C / jnp.sum(frequency_C))


def accepted(verdicts_NJ: Array, accuracy_N: Array, *, low: float = 0.125, high: float = 0.875) -> Array:
    """bool[N]: new problems with a "perfect" (2) and no "bad" (0) verdict, and the start policy's accuracy in [low, high]."""
    good = jnp.any(verdicts_NJ == 2, axis=1) & ~jnp.any(verdicts_NJ == 0, axis=1)
    return good & (low - 1e-6 <= accuracy_N) & (accuracy_N <= high + 1e-6)


@prompt_filter
def sws(*, low: float = 0.125, high: float = 0.875) -> Filter:
    """Prompts whose share of right rollouts is in [low, high]."""
    def keep(rollouts):
        accuracy = masked.mean(rollouts.correct.astype(jnp.float32), rollouts.valid, axis=1)
        return jnp.any(rollouts.valid, axis=1) & (low - 1e-6 <= accuracy) & (accuracy <= high + 1e-6)

    return Filter(keep)

"""Covariance of log-prob and advantage over the tokens of a batch, and the selection of a few tokens by a score.

The entropy of a softmax policy falls at the rate of this covariance; a few tokens have most of it (arXiv 2505.22617).
"""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked


def covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """`(A_t - mean A) * (log p_t - mean log p)`, [P, G, T], means over the whole `mask`; detached, 0 outside."""
    logprobs = lax.stop_gradient(logprobs)
    product = (advantages - masked.mean(advantages, mask)) * (logprobs - masked.mean(logprobs, mask))
    return jnp.where(mask, product, jnp.zeros((), product.dtype))


def largest(scores: Array, candidates: Array, mask: Array, fraction: float) -> Array:
    """bool like `scores`: the k candidates with the largest scores (all of them, if there are fewer), ties by position.

    `k = max(floor(fraction * number of True entries of mask), 1)`: `fraction` is a share of all tokens.
    """
    fraction *= 1 + 1e-6  # 0.29 * 100 is 28.999... in some precisions; k must be 29 in all
    limit = max(int(fraction * scores.size), 1)
    k = jnp.maximum(jnp.floor(fraction * masked.count(mask)), 1)
    best, position = lax.top_k(jnp.where(candidates, scores, -jnp.inf).ravel(), limit)
    chosen = (jnp.arange(limit) < k) & jnp.isfinite(best)
    return jnp.zeros(scores.size, jnp.bool_).at[position].set(chosen).reshape(scores.shape)

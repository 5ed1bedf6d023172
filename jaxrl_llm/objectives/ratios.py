"""Importance ratios between the policy being trained and the one that sampled; log-ratios are clamped before `exp`.

All take `logprobs` [P, G, T] (differentiable), `old_logprobs` [P, G, T] or None (on-policy: the ratio is 1 and only its
gradient counts) and `mask` [P, G, T].
"""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked

LIMIT = 20.0


def log_ratio(logprobs: Array, old_logprobs: Array | None, mask: Array, *, limit: float = LIMIT) -> Array:
    """`clamp(logprobs - old_logprobs, -limit, limit)`, [P, G, T]; 0 and without gradient outside the mask."""
    old = lax.stop_gradient(logprobs if old_logprobs is None else old_logprobs)
    # The inputs are masked, not the result: exp of a padded infinity would give a NaN gradient through a later `where`.
    return jnp.clip(jnp.where(mask, logprobs, 0) - jnp.where(mask, old, 0), -limit, limit)


def token_ratio(logprobs: Array, old_logprobs: Array | None, mask: Array, *, limit: float = LIMIT) -> Array:
    """`exp(log_ratio)` per token, [P, G, T]; 1 outside the mask."""
    return jnp.exp(log_ratio(logprobs, old_logprobs, mask, limit=limit))


def sequence_ratio(logprobs: Array, old_logprobs: Array | None, mask: Array, *, length_normalised: bool = True,
                   limit: float = LIMIT) -> Array:
    """Ratio of completions, [P, G]: `exp(mean_t (new - old))` (GSPO, arXiv 2507.18071) or `exp(sum_t (new - old))`."""
    reduce = masked.mean if length_normalised else masked.sum
    old = lax.stop_gradient(logprobs if old_logprobs is None else old_logprobs)
    difference = jnp.where(mask, logprobs, 0) - jnp.where(mask, old, 0)
    return jnp.exp(jnp.clip(reduce(difference, mask, axis=-1), -limit, limit))


def prefix_ratio(logprobs: Array, old_logprobs: Array | None, mask: Array, *, limit: float = LIMIT) -> Array:
    """Ratio of the completion up to and including each token, [P, G, T]: `exp(sum_{j<=t} log_ratio_j)`."""
    per_token = log_ratio(logprobs, old_logprobs, mask, limit=limit)
    return jnp.exp(jnp.clip(jnp.cumsum(per_token, axis=-1), -limit, limit))

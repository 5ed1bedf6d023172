"""Importance weights for data of another policy or another engine: their level, their bounds and their spread."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.ratios import sequence_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import inside

ANCHORS = ("old", "behavior")
LEVELS = ("token", "sequence", "geometric")
BOUNDS = ("truncate", "clip", "mask")


def anchor_logprobs(rollouts: Rollouts, anchor: str) -> Array | None:
    """[P, G, T]: log-probs of a ratio's denominator: the policy before the update ("old") or the one that sampled."""
    return rollouts.old_logprobs if anchor == "old" else rollouts.behavior_logprobs


def importance(logprobs: Array, other: Array | None, mask: Array, level: str = "token") -> Array:
    """Detached ratio of two policies for each token, [P, G, T], with `d = logprobs - other`.

    `token` exp(d_t), `sequence` exp(sum_t d_t), `geometric` exp(mean_t d_t); the last two repeated on every token.
    """
    if level == "token":
        return lax.stop_gradient(token_ratio(logprobs, other, mask))
    whole = sequence_ratio(logprobs, other, mask, length_normalised=level == "geometric")
    return lax.stop_gradient(masked.to_tokens(whole, mask))


def bounded(ratio: Array, how: str | None, low: float, high: float) -> Array:
    """`truncate` min(ratio, high), `clip` to [low, high], `mask` 0 outside [low, high], None: unchanged."""
    if how == "truncate":
        return jnp.minimum(ratio, high)
    if how == "clip":
        return jnp.clip(ratio, low, high)
    return ratio if how is None else jnp.where(inside(ratio, low, high), ratio, 0)


def carried(value: Array, logprobs: Array) -> Array:
    """`value`, with the gradient `value * d logprobs`: a detached ratio made differentiable, so that it can be clipped."""
    return lax.stop_gradient(value) * jnp.exp(logprobs - lax.stop_gradient(logprobs))


def effective_share(weights: Array, mask: Array, *, eps: float = 1e-8) -> Array:
    """Effective sample size per sample, `(sum w)^2 / (n (sum w^2 + eps))`, one number; 1 for equal weights."""
    total, squares = masked.sum(weights, mask), masked.sum(weights**2, mask)
    return total**2 / ((squares + eps) * jnp.maximum(masked.count(mask, dtype=weights.dtype), 1))

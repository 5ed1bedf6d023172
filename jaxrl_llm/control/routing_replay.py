"""Routing replay for mixture-of-experts policies: fixed experts, fresh gates (arXiv 2512.01374)."""
import jax
import jax.numpy as jnp
from jax import Array, lax


def gates(router_logits: Array, experts: Array) -> Array:
    """`exp(s_i) / sum_{j in I} exp(s_j)`, f32[N, K], of the experts I = `experts` i32[N, K] of each of N tokens.

    `router_logits` f32[N, E] are the learner's, and gradients flow into them. I are the experts chosen by the learner's old
    policy (R2) or by the sampler (R3).
    """
    return jax.nn.softmax(jnp.take_along_axis(router_logits, experts, axis=-1), axis=-1)


def choose(router_logits: Array, recorded: Array, known: Array) -> Array:
    """i32[N, K]: `recorded` i32[N, K] where `known` bool[N], elsewhere (no record) the K largest of `router_logits`."""
    free = lax.top_k(router_logits, recorded.shape[-1])[1]
    return jnp.where(known[:, None], recorded, free)

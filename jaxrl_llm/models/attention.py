"""Rotary embeddings and grouped attention over a shared prompt and a row's own tokens."""
import math

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig, RopeScaling

_MASKED = -1e30  # finite: a query that sees nothing gets a uniform softmax instead of NaN


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Inverse frequencies `f32[head_dim/2]`, theta^(-2i/head_dim), with the checkpoint's scaling applied."""
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    raise ValueError(f"rope scaling {scaling.kind!r} is not supported; supported: 'linear', 'llama3'")


def layer_frequencies(config: ModelConfig) -> jax.Array:
    """Inverse frequencies of every layer, `f32[L, head_dim/2]`; sliding-window layers have a base of their own."""
    full = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    local = rotary_frequencies(config.head_dim, config.rope_local_theta)
    return jnp.where(jnp.asarray(config.local_layers)[:, None], local, full)


def apply_rotary(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotates `x [..., heads, head_dim]` by `positions i32[...]`, pairing dimension i with i + head_dim/2."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def grouped_attention(queries, keys, values, mask, shared=None, *, scale):
    """Softmax attention of each row over its own keys and over keys that its whole group shares.

    The shared keys are never copied G times: all queries of a group meet them in one matrix product, and the two parts
    of the softmax are merged by their common maximum and sum (arXiv 2506.05433 gives the packing this serves).

    Args:
      queries: `[P, G, T, H, d]`.
      keys, values: `[P, G, U, K, d]`, the row's own; K divides H (grouped-query attention).
      mask: `bool`, broadcastable to `[P, G, T, U]`: which own keys a query sees.
      shared: `None` or `(keys [P, S, K, d], values [P, S, K, d], mask bool broadcastable to [P, G, T, S])`.
      scale: factor on the scores.
    Returns:
      `[P, G, T, H, d]` in the dtype of the values.
    """
    P, G, T, H, d = queries.shape
    K = keys.shape[3]
    chex.assert_equal_shape([keys, values])
    queries = (queries * scale).reshape(P, G, T, K, H // K, d)
    f32 = dict(preferred_element_type=jnp.float32)
    own = jnp.einsum("pgtkrd,pgukd->pgkrtu", queries, keys, **f32)
    own = jnp.where(mask[:, :, None, None], own, _MASKED)
    top = own.max(-1, keepdims=True)
    if shared is None:
        weights = jnp.exp(own - jax.lax.stop_gradient(top))
        total = weights.sum(-1, keepdims=True)
        out = jnp.einsum("pgkrtu,pgukd->pgtkrd", (weights / total).astype(values.dtype), values)
        return out.reshape(P, G, T, H, d)
    shared_keys, shared_values, shared_mask = shared
    prompt = jnp.einsum("pgtkrd,pskd->pgkrts", queries, shared_keys, **f32)
    prompt = jnp.where(shared_mask[:, :, None, None], prompt, _MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(top, prompt.max(-1, keepdims=True)))
    own, prompt = jnp.exp(own - top), jnp.exp(prompt - top)
    total = own.sum(-1, keepdims=True) + prompt.sum(-1, keepdims=True)
    out = jnp.einsum("pgkrtu,pgukd->pgtkrd", (own / total).astype(values.dtype), values)
    out += jnp.einsum("pgkrts,pskd->pgtkrd", (prompt / total).astype(values.dtype), shared_values)
    return out.reshape(P, G, T, H, d)


def in_window(query_positions, key_positions, window, local):
    """Whether a key lies inside the sliding window of a query: `bool[..., T, U]` from positions `[..., T]`, `[..., U]`.

    `local` (bool scalar, may be traced) says whether this layer has a window at all.
    """
    if window is None:
        return jnp.ones((1,) * query_positions.ndim + (1,), bool)
    near = query_positions[..., :, None] - key_positions[..., None, :] < window
    return near | ~jnp.asarray(local)

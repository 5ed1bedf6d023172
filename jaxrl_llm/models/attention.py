"""Rotary embeddings and grouped attention over a shared prompt and a row's own tokens."""
import math
from typing import NamedTuple

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


class Rotations(NamedTuple):
    """Cosines and sines of the rotary angles at given positions, computed once for all layers.

    full, local: `(cos, sin)`, each `f32[..., 1, head_dim/2]`; sliding-window layers have a base of their own (`local` is
    None without such layers).
    """

    full: tuple[jax.Array, jax.Array]
    local: tuple[jax.Array, jax.Array] | None

    def of_layer(self, local) -> tuple[jax.Array, jax.Array]:
        """`(cos, sin)` of a layer; `local` (bool scalar, may be traced) says whether it has a sliding window."""
        if self.local is None:
            return self.full
        cos, sin = (jnp.where(jnp.asarray(local), a, b) for a, b in zip(self.local, self.full))
        return cos, sin


def rotations(config: ModelConfig, positions: jax.Array) -> Rotations:
    """The rotary tables of a model at `positions i32[...]`."""
    def table(frequencies):
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    local = table(rotary_frequencies(config.head_dim, config.rope_local_theta)) if any(config.local_layers) else None
    return Rotations(table(rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)), local)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x [..., heads, head_dim]` by `cos, sin f32[..., 1, head_dim/2]`, pairing dimension i with i + head_dim/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def grouped_attention(queries, keys, values, mask, shared=None, *, scale):
    """Softmax attention of each row over its own keys and over keys that its whole group shares.

    The shared keys are never copied G times: all queries of a group meet them in one matrix product, and the two parts
    of the softmax are merged by their common maximum and sum (arXiv 2506.05433 gives the packing this serves).

    Args:
      queries: `[P, G, T, H, d]`.
      keys, values: `[P, G, K, U, d]`, the row's own; K divides H (grouped-query attention). Heads come before positions,
        the order in which the matrix products read them.
      mask: `bool`, broadcastable to `[P, G, T, U]`: which own keys a query sees.
      shared: `None` or `(keys [P, K, S, d], values [P, K, S, d], mask bool broadcastable to [P, G, T, S])`.
      scale: factor on the scores.
    Returns:
      `[P, G, T, H, d]` in the dtype of the values.
    """
    P, G, T, H, d = queries.shape
    K = keys.shape[2]
    chex.assert_equal_shape([keys, values])
    grouped = (queries * scale).reshape(P, G, T, K, H // K, d).transpose(0, 1, 3, 4, 2, 5)  # [P, G, K, H/K, T, d]
    own = jnp.where(mask[:, :, None, None], _scores(grouped, keys), _MASKED)
    top = jax.lax.stop_gradient(own.max(-1, keepdims=True))
    if shared is None:
        weights = jnp.exp(own - top)
        out = _weighted(weights / weights.sum(-1, keepdims=True), values)
        return out.transpose(0, 1, 4, 2, 3, 5).reshape(P, G, T, H, d)
    swap = lambda y: jnp.swapaxes(y, 1, 2)  # noqa: E731  [P, G, K, ...] <-> [P, K, G, ...]
    shared_keys, shared_values, shared_mask = shared
    prompt = jnp.where(shared_mask[:, None, :, None], _scores(swap(grouped), shared_keys), _MASKED)
    top = jnp.maximum(top, swap(jax.lax.stop_gradient(prompt.max(-1, keepdims=True))))
    own, prompt = jnp.exp(own - top), jnp.exp(prompt - swap(top))
    total = own.sum(-1, keepdims=True) + swap(prompt.sum(-1, keepdims=True))
    out = _weighted(own / total, values) + swap(_weighted(prompt / swap(total), shared_values))
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(P, G, T, H, d)


def _scores(queries, keys):
    """Float32 products of `queries [..., a, b, c, d]` with `keys [..., U, d]`: `[..., a, b, c, U]`, one matrix product each.

    The queries are the left operand as they lie: an einsum may choose the other order, which costs several times more.
    """
    batch = tuple(range(keys.ndim - 2))
    rows = queries.reshape(*keys.shape[:-2], -1, keys.shape[-1])
    found = jax.lax.dot_general(rows, keys, (((rows.ndim - 1,), (keys.ndim - 1,)), (batch, batch)),
                                preferred_element_type=jnp.float32)
    return found.reshape(*queries.shape[:-1], keys.shape[-2])


def _weighted(weights, values):
    """`weights [..., a, b, c, U]` times `values [..., U, d]`: `[..., a, b, c, d]` in the dtype of the values."""
    rows = weights.astype(values.dtype).reshape(*values.shape[:-2], -1, values.shape[-2])
    return (rows @ values).reshape(*weights.shape[:-1], values.shape[-1])


def in_window(query_positions, key_positions, window, local):
    """Whether a key lies inside the sliding window of a query: `bool[..., T, U]` from positions `[..., T]`, `[..., U]`.

    `local` (bool scalar, may be traced) says whether this layer has a window at all.
    """
    if window is None:
        return jnp.ones((1,) * query_positions.ndim + (1,), bool)
    near = query_positions[..., :, None] - key_positions[..., None, :] < window
    return near | ~jnp.asarray(local)

"""Rotary embeddings; attention over a shared prompt and a row's own tokens, and over the ancestors in a row of trees."""
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxrl_llm.kernels import rows as kernels_of_rows
from jaxrl_llm.kernels.attention import BLOCK, MASKED, attention
from jaxrl_llm.kernels.choice import chosen
from jaxrl_llm.kernels.flash import FAR, RowMask
from jaxrl_llm.models.config import ModelConfig, RopeScaling


def rotary_frequencies(dims: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Inverse frequencies `f32[dims/2]`, theta^(-2i/dims), with the checkpoint's scaling applied.

    For `dynamic` and `longrope` these are the frequencies within the original context.
    """
    frequencies = theta ** -(jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    if scaling.kind == "yarn":
        return frequencies * (1 - _yarn_ramp(dims, theta, scaling) * (1 - 1 / scaling.factor))
    if scaling.kind == "longrope":
        return frequencies / jnp.asarray(scaling.short_factors, jnp.float32)
    raise ValueError(f"rope scaling {scaling.kind!r} is not supported; supported: 'linear', 'dynamic', 'llama3', 'yarn', "
                     "'longrope'")


def _yarn_ramp(dims: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """How far each frequency is divided, from 0 to 1, by the turns it makes in the original context (arXiv 2309.00071)."""
    def dimension(turns):
        return dims * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.high_freq_factor), dimension(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    return jnp.clip((jnp.arange(dims // 2, dtype=jnp.float32) - first) / (last - first or 0.001), 0.0, 1.0)


class Rotations(NamedTuple):
    """Cosines and sines of the rotary angles at given positions, computed once for all layers.

    full, local: `(cos, sin)`, each `f32[..., 1, rotary_dim/2]`; sliding-window layers may have their own base (`local` is
    None otherwise).
    """

    full: tuple[jax.Array, jax.Array]
    local: tuple[jax.Array, jax.Array] | None

    def of_layer(self, local, rotated=None) -> tuple[jax.Array, jax.Array]:
        """`(cos, sin)` of a layer.

        `local` and `rotated` (bool scalars, may be traced) say whether it has a sliding window, and whether it rotates at all
        (None: it does).
        """
        cos, sin = self.full
        if self.local is not None:
            cos, sin = (jnp.where(jnp.asarray(local), a, b) for a, b in zip(self.local, self.full))
        return (cos, sin) if rotated is None else (jnp.where(rotated, cos, 1.0), jnp.where(rotated, sin, 0.0))


def rotations(config: ModelConfig, positions: jax.Array) -> Rotations:
    """The rotary tables of a model at `positions i32[...]`."""
    def table(theta, scaling):
        frequencies = rotary_frequencies(config.rotary_dim, theta, scaling)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        factor = 1.0 if scaling is None else scaling.attention_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    full, local = (config.rope_theta, config.rope_scaling), (config.rope_local_theta, config.rope_local_scaling)
    local_table = table(*local) if any(config.local_layers) and local != full else None
    return Rotations(table(*full), local_table)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first n dimensions of `x [..., heads, head_dim]` by `cos, sin f32[..., 1, n/2]`, pairing i with i + n/2."""
    n = 2 * cos.shape[-1]
    if n < x.shape[-1]:
        return jnp.concatenate([apply_rotary(x[..., :n], cos, sin), x[..., n:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def grouped_attention(queries, keys, values, mask, *shared, scale, softcap=None):
    """Softmax attention of each row over its own keys and over keys that its whole group, or several groups, share.

    The shared keys are never copied: all their queries meet them in one matrix product, and the parts of the softmax are
    merged by their common maximum and sum (arXiv 2506.05433 gives the packing this serves).

    Args:
      queries: `[P, G, T, H, d]`.
      keys, values: `[P, K, G, U, d]`, the row's own; K divides H (grouped-query attention). Heads come before rows, so that
        queries and scores have one order for own and for shared keys. Where no gradient is taken, these and the shared ones
        may be `Int8`.
      mask: `bool`, broadcastable to `[P, G, T, U]`: which own keys a query sees.
      shared: any number of `(keys [P/n, K, S, d], values [P/n, K, S, d], mask bool broadcastable to [P, G, T, S])`, each
        shared by n consecutive groups.
      scale: factor on the scores.
      softcap: scores s become softcap * tanh(s / softcap); None: they stay (arXiv 2408.00118).
    Returns:
      `[P, G, T, H, d]` in the dtype of the queries; 0 for a query that sees nothing.
    """
    def source(keys, values, mask):
        return (keys, values, _bias(mask)[:, None, :, None], Partial(_as_it_is))
    return _over_sources(queries, [source(keys, values, mask), *(source(*one) for one in shared)], scale, softcap)


def tree_attention(queries, keys, values, end, positions, window, local, *, scale, softcap=None, kernels="plain", begin=None):
    """Softmax attention in rows of trees in depth-first order: each token sees itself and its ancestors.

    Scores exist for a pair of blocks at a time, and only for pairs in which some query sees some key.

    Args:
      queries: `[R, T, H, d]`, of all N slots, or of T slots from `begin i32[]` on.
      keys, values: `[R, K, N, d]`.
      end: `i32[R, N]`: the query in slot q sees the key in slot k if `k <= q < end[k]`.
      positions, window, local: for sliding windows, see `in_window`; positions `i32[R, N]`.
      scale, softcap: as in `grouped_attention`.
      kernels: see `kernels.choice`.
    Returns:
      `[R, T, H, d]`; 0 for a query that sees nothing.
    """
    chex.assert_equal_shape([end, positions])
    R, T, H, d = queries.shape
    K, reach = keys.shape[1], FAR if window is None else jnp.where(local, window, FAR)
    grouped = (queries * scale).reshape(R, T, K, H // K, d).transpose(0, 2, 3, 1, 4)  # [R, K, H/K, T, d]
    rows = RowMask(end, positions, jnp.asarray(reach, jnp.int32), begin)
    out = kernels_of_rows.attention(kernels, softcap, grouped, keys, values, rows)
    return out.transpose(0, 3, 1, 2, 4).reshape(R, T, H, d)


def in_blocks(tokens: int, kernels: str) -> bool:
    """Whether rectangular rows of `tokens` tokens are computed as trees: if longer than a block of queries, or on a TPU.

    Scores then exist only for pairs of blocks, and blocks of keys after all queries are skipped.
    """
    return tokens > BLOCK or chosen(kernels) == "tpu"


def by_cudnn(queries, window, softcap, kernels: str) -> bool:
    """Whether groups that share a prompt are computed by cuDNN, which does not support windows that change by layer."""
    if window is not None or chosen(kernels) != "cuda":
        return False
    from jaxrl_llm.kernels import cudnn
    return cudnn.serves(queries, softcap)


def group_by_cudnn(queries, own, shared, prompt_mask, *, scale):
    """Attention of completions `[P, G, T, H, d]` over `own` keys and values `[P, G, T, K, d]` and their prompt's.

    `shared` keys and values `[P, S, K, d]` count where `prompt_mask bool[P, S]`, wherever their padding is.
    """
    from jaxrl_llm.kernels import cudnn
    order = jnp.argsort(~prompt_mask, axis=-1, stable=True)[:, :, None, None]  # cuDNN counts keys from the first on
    shared = tuple(jnp.take_along_axis(x, order, axis=1) for x in shared)
    return cudnn.group_attention("cudnn", queries * scale, own, shared, prompt_mask.sum(-1, dtype=jnp.int32))


def _bias(mask):
    return jnp.where(mask, 0.0, MASKED)


def _as_it_is(bias):
    return bias


def _over_sources(queries, sources, scale, softcap):
    """Attention of `queries [P, G, T, H, d]` over `sources`, see `attention`, in the same shape."""
    P, G, T, H, d = queries.shape
    K = sources[0][0].shape[1]
    for keys, values, *_ in sources:
        chex.assert_equal_shape([keys, values])
    grouped = (queries * scale).reshape(P, G, T, K, H // K, d).transpose(0, 3, 1, 4, 2, 5)  # [P, K, G, H/K, T, d]
    return attention(softcap, grouped, sources).transpose(0, 2, 4, 1, 3, 5).reshape(P, G, T, H, d)


def held(count, places: int):
    """`i32[..., n]`: the position that each of n `places` holds of the `count i32[...]` first ones; negative: none.

    Position p is in place p mod n, so that a sliding-window layer needs no more places than its window.
    """
    newest = count[..., None] - 1
    return newest - (newest - jnp.arange(places)) % places


def in_window(query_positions, key_positions, window, local):
    """Whether a key is inside the sliding window of a query: `bool[..., T, U]` from positions `[..., T]`, `[..., U]`.

    `local` (bool scalar, may be traced) says whether this layer has a window at all.
    """
    if window is None:
        return jnp.ones((1,) * query_positions.ndim + (1,), bool)
    near = query_positions[..., :, None] - key_positions[..., None, :] < window
    return near | ~jnp.asarray(local)

"""Attention of single queries over paged caches, for decoding: a table names the pages that hold a row's keys.

NVIDIA GPUs run JAX's paged attention, TPUs its ragged paged attention. Each requires its own memory order of the cache, see
`laid`. The cache is kept in that order, so decoding transposes nothing; `written`, `read` and `page_axis` know it.
"""
import math

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.attention import MASKED, capped
from jaxrl_llm.kernels.choice import chosen

_SPLITS = 16  # most parts of a row's pages that a GPU works on side by side
_TOGETHER = 8  # most pages that it reads at a time
_KEYS, _QUERIES = 512, 32  # that a TPU works on at a time


def laid(kernels: str, keys, values) -> tuple[jax.Array, ...]:
    """`keys, values [n, page, K, d]` in the order of a platform's kernel: the `cache` argument of `paged_attention`."""
    chex.assert_rank([keys, values], 4)
    kernels = chosen(kernels)
    if kernels == "cuda":
        return jnp.moveaxis(keys, 2, 0), jnp.moveaxis(values, 2, 0)
    if kernels == "tpu":  # key and value of a head beside each other
        return jnp.stack([keys, values], axis=3).reshape(*keys.shape[:2], -1, keys.shape[-1]),
    return keys, values


def page_axis(kernels: str) -> int:
    """The axis of pages in the arrays of `laid`."""
    return 1 if chosen(kernels) == "cuda" else 0


def head_axis(kernels: str) -> int:
    """The axis of key/value heads in the arrays of `laid`; keys and values of a head are beside each other."""
    return 0 if chosen(kernels) == "cuda" else 2


def written(kernels: str, cache, keys, values, page, place) -> tuple[jax.Array, ...]:
    """The cache with `keys, values [m, K, d]` in places `place i32[m]` of the pages `page i32[m]`."""
    chex.assert_equal_shape([page, place])
    kernels = chosen(kernels)
    if kernels == "cuda":
        return tuple(old.at[:, page, place].set(jnp.moveaxis(new, 1, 0)) for old, new in zip(cache, (keys, values)))
    if kernels == "tpu":
        both = jnp.stack([keys, values], axis=2).reshape(len(keys), -1, keys.shape[-1])
        return cache[0].at[page, place].set(both),
    return tuple(old.at[page, place].set(new) for old, new in zip(cache, (keys, values)))


def read(kernels: str, cache, table) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[B, K, U, d]` of all U places of the pages `table i32[B, m]`."""
    kernels = chosen(kernels)
    if kernels == "cuda":
        parts = [jnp.moveaxis(x[:, table], 0, 3) for x in cache]
    elif kernels == "tpu":
        both = cache[0][table]
        parts = [both[..., 0::2, :], both[..., 1::2, :]]
    else:
        parts = [x[table] for x in cache]
    keys, values = (jnp.moveaxis(x.reshape(len(table), -1, *x.shape[3:]), 2, 1) for x in parts)
    return keys, values


def plain_paged_attention(softcap, queries, keys, values, table, lengths):
    """The reference of `paged_attention`: pages put together, one softmax."""
    def of_rows(x):  # [B, m page, K, d]
        return x[table].reshape(len(table), -1, *x.shape[2:])
    keys, values = of_rows(keys), of_rows(values)
    B, H, d = queries.shape
    grouped = queries.reshape(B, keys.shape[2], -1, d)
    scores = capped(jnp.einsum("bkhd,bukd->bkhu", grouped, keys, preferred_element_type=jnp.float32), softcap)
    weights = jax.nn.softmax(jnp.where(jnp.arange(keys.shape[1]) < lengths[:, None, None, None], scores, MASKED))
    out = jnp.einsum("bkhu,bukd->bkhd", weights, values, preferred_element_type=jnp.float32)
    return out.astype(queries.dtype).reshape(B, H, d)


def paged_attention(kernels: str, softcap, queries, cache, table, lengths, interpret: bool = False):
    """Attention of scaled `queries [B, H, d]`, one per row, over the row's keys; the result has the shape of the queries.

    Args:
      kernels: the set of kernels to use, see `kernels.choice`.
      softcap: scores s become softcap * tanh(s / softcap); None: they stay.
      cache: see `laid`; K divides H.
      table: `i32[B, m]`, the pages of each row, in order; a page may belong to several rows.
      lengths: `i32[B]`, keys of each row, at least one.
      interpret: runs a GPU's program on any platform, slowly, for tests.
    """
    kernels = chosen(kernels)
    if kernels == "cuda":
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as on_gpu
        splits = math.gcd(table.shape[1], _SPLITS)
        return on_gpu(queries, *cache, table, lengths, attn_logits_soft_cap=softcap, interpret=interpret, k_splits=splits,
                      pages_per_compute_block=math.gcd(table.shape[1] // splits, _TOGETHER))
    if kernels == "tpu":
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
        count, (_, page, _, _) = len(queries), cache[0].shape
        pages = min(table.shape[1], max(1, _KEYS // page))
        return ragged_paged_attention(queries, *cache, lengths, table, jnp.arange(count + 1, dtype=jnp.int32),
                                      jnp.array([count], jnp.int32), soft_cap=softcap,
                                      num_kv_pages_per_block=pages, num_queries_per_block=min(count, _QUERIES))
    keys, values = cache
    return plain_paged_attention(softcap, queries, keys, values, table, lengths)

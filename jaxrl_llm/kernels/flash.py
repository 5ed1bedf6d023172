"""Causal attention in long rows of trees: an online softmax over blocks of keys, so that memory is linear in the row."""
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.kernels.attention import MASKED, SAVED, capped, score_products, summed_rows, weighted_sum

BLOCK = 512  # queries, and keys, whose scores exist at a time
FAR = 1 << 30  # a reach beyond all positions


class RowMask(NamedTuple):
    """Which keys the queries of a row see.

    end: `i32[R, N]`; the query in slot q sees the key in slot k if `k <= q < end[k]`; 0 on padding.
    positions: `i32[R, N]`, for sliding windows.
    reach: `i32[]`, `FAR` at most; a query sees keys fewer than this many positions before it.
    begin: `i32[]`, the slot of the first query, if the queries are those of some consecutive slots; None: all slots.
    """

    end: jax.Array
    positions: jax.Array
    reach: jax.Array
    begin: jax.Array | None = None

    def of_queries(self, x, count: int):
        """The entries of an array `[R, N]` of slots that belong to the `count` queries."""
        return x if self.begin is None else jax.lax.dynamic_slice_in_dim(x, self.begin, count, axis=1)

    def query_slots(self, slots):
        """The slots of queries that are numbered from 0."""
        return slots if self.begin is None else self.begin + slots


class Kernel(NamedTuple):
    """Attention without score matrices. Sums are taken over the exponentials of a query's scores; H is the number of heads.

    fits: `(queries, rows) -> bool[]`, whether it can compute these rows.
    forward: `(softcap, queries, keys, values, rows) -> (out, logarithms of sums f32[R, H, T])`.
    backward: `(softcap, queries, keys, values, rows, out, logarithms, d_out) -> (d_queries, d_keys, d_values)`.
    """

    fits: Callable
    forward: Callable
    backward: Callable


def plain_flash_attention(softcap, queries, keys, values, rows: RowMask):
    """The reference of `flash_attention`: one softmax over all keys, whose scores exist at once."""
    scores = jnp.einsum("rkhqd,rksd->rkhqs", queries, keys, preferred_element_type=jnp.float32)
    T = queries.shape[-2]
    seen = seen_by(rows, rows.query_slots(jnp.arange(T)), (rows.end, rows.positions), jnp.arange(keys.shape[-2]),
                   rows.of_queries(rows.positions, T))
    scores = jnp.where(seen, capped(scores, softcap), MASKED)
    weights = jnp.where(seen, jax.nn.softmax(scores), 0.0)
    return jnp.einsum("rkhqs,rksd->rkhqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
                      ).astype(values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(softcap, queries, keys, values, rows: RowMask):
    """Attention of scaled `queries [R, K, H/K, T, d]` over `keys, values [R, K, N, d]`, in the shape of the queries.

    T is N, or fewer if `rows.begin` gives the slot of the first query. The result is 0 where a query sees nothing.

    Each block of queries visits in turn the blocks of keys that one of its queries may see, and corrects maxima and sums as it
    goes (arXiv 2205.14135, algorithm 1). The backward pass recomputes the scores of each pair of blocks, starting from outputs,
    maxima and inverse sums, which carry the name `SAVED` for a checkpoint policy. Scores and sums are float32; a softcap c
    turns a score s into c tanh(s / c).
    """
    return _forward(softcap, queries, keys, values, rows)[0]


def _forward(softcap, queries, keys, values, rows):
    out, tops, inverses = checkpoint_name(forward(softcap, queries, keys, values, rows), SAVED)
    return out, (queries, keys, values, rows, out, tops, inverses)


def forward(softcap, queries, keys, values, rows):
    """Outputs, maxima and inverse sums, the latter `f32[R, K, H/K, T, 1]`; inverse sums are 0 where a query sees nothing."""
    R, K, _, T, d = queries.shape
    N = rows.end.shape[1]
    chex.assert_shape([keys, values], (R, K, N, d))
    chex.assert_shape(rows.positions, (R, N))
    size = min(BLOCK, T)
    (q, k, v), padded, positions = _padded((queries, keys, values), rows, T, size)
    order, counts = visits(padded, size, positions)

    def of_queries(_, i):
        mine = _part(q, i, size)

        def over_keys(n, state):
            top, total, out = state
            j = order[i, n]
            scores, seen = _block_scores(softcap, mine, k, padded, positions, i, j, size)
            scores = jnp.where(seen, scores, MASKED)
            new = jnp.maximum(top, scores.max(-1, keepdims=True))
            odds, shrink = jnp.exp(scores - new), jnp.exp(top - new)
            return new, total * shrink + odds.sum(-1, keepdims=True), out * shrink + weighted_sum(odds, _part(v, j, size))

        empty = jnp.zeros((*mine.shape[:-1], 1), jnp.float32)
        begun = empty + MASKED, empty, jnp.zeros(mine.shape, jnp.float32)
        top, total, out = jax.lax.fori_loop(0, counts[i], over_keys, begun)
        inverse = jnp.where(top > MASKED / 2, 1 / jnp.where(total > 0, total, 1.0), 0.0)
        return (), ((out * inverse).astype(values.dtype), top, inverse)

    blocks = jax.lax.scan(of_queries, (), jnp.arange(len(counts)))[1]
    return tuple(_joined(x)[..., :T, :] for x in blocks)


def backward(softcap, saved, d_out):
    """Gradients in queries, keys and values, and None; weights are `exp(score - top) * inverse` of what `forward` returned."""
    queries, keys, values, rows, out, tops, inverses = saved
    T, N = queries.shape[-2], keys.shape[-2]
    size = min(BLOCK, T)
    lost = jnp.sum(d_out.astype(jnp.float32) * out, -1, keepdims=True)
    arrays, padded, positions = _padded((queries, keys, values, d_out, tops, inverses, lost), rows, T, size)
    q, k, v, *kept = arrays
    order, counts = visits(padded, size, positions)

    def of_queries(sums, i):
        mine, d_mine, top, inverse, mine_lost = (_part(x, i, size) for x in (q, *kept))

        def over_keys(n, state):
            d_queries, d_keys, d_values = state
            j = order[i, n]
            theirs = _part(k, j, size)
            scores, seen = _block_scores(softcap, mine, k, padded, positions, i, j, size)
            weights = jnp.exp(jnp.where(seen, scores, MASKED) - top) * inverse
            slopes = weights * (score_products(d_mine, _part(v, j, size)) - mine_lost)
            if softcap is not None:
                slopes *= 1 - (scores / softcap) ** 2
            return (d_queries + weighted_sum(slopes, theirs), _added(d_keys, summed_rows(slopes, mine, theirs), j, size),
                    _added(d_values, summed_rows(weights, d_mine, theirs), j, size))

        d_queries, *sums = jax.lax.fori_loop(0, counts[i], over_keys, (jnp.zeros(mine.shape, jnp.float32), *sums))
        return tuple(sums), d_queries.astype(queries.dtype)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (d_keys, d_values), d_queries = jax.lax.scan(of_queries, zeros, jnp.arange(len(counts)))
    d_keys, d_values = d_keys[..., :N, :].astype(keys.dtype), d_values[..., :N, :].astype(values.dtype)
    return _joined(d_queries)[..., :T, :], d_keys, d_values, None


flash_attention.defvjp(_forward, backward)


def _padded(arrays, rows: RowMask, T: int, size: int):
    """Arrays with slots on axis -2, their rows, and the queries' positions, up to multiples of the block.

    Padding is seen by no query.
    """
    arrays = [jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, -x.shape[-2] % size), (0, 0))) for x in arrays]
    def pad(x):
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    padded = rows._replace(end=pad(rows.end), positions=pad(rows.positions))
    if rows.begin is None:
        return arrays, padded, padded.positions
    positions = rows.of_queries(rows.positions, T)  # behind them beyond every reach: these slots have other queries elsewhere
    return arrays, padded, jnp.pad(positions, ((0, 0), (0, -T % size)), constant_values=jnp.iinfo(jnp.int32).max)


def visits(rows: RowMask, size: int, positions=None):
    """Blocks of keys that each block of queries has to visit: `(order i32[n, m], counts i32[n])`, the first `counts` of a row.

    It skips blocks after the queries, blocks whose subtrees have all ended before them, and blocks outside every window. All
    rows visit the same blocks, so devices of a mesh agree on them. `positions` belong to the queries, to all slots if None.
    """
    if rows.begin is None and rows.end.shape[1] == size:  # nothing to leave out, nor to agree on
        return jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    blocks = jax.tree.map(lambda x: x.reshape(len(x), -1, size), (rows.end, rows.positions))
    real = blocks[0] > 0
    numbers = jnp.arange(blocks[0].shape[1])
    last_end = blocks[0].max(-1)
    if rows.begin is None:
        mine, first = numbers, jnp.where(real, blocks[1], FAR).min(-1)
    else:
        first = positions.reshape(len(positions), -1, size).min(-1)
        mine = jnp.arange(first.shape[1])
    last = jnp.where(real, blocks[1], -1).max(-1)
    near = (first[:, :, None] - rows.reach) < last[:, None]
    visible = (near & (last_end[:, None] > rows.query_slots(mine[:, None] * size))).any(0)
    visible &= numbers[:, None] >= numbers if rows.begin is None else numbers * size < rows.begin + (mine[:, None] + 1) * size
    return jnp.argsort(~visible, axis=-1, stable=True), visible.sum(-1)


def _block_scores(softcap, queries, keys, rows: RowMask, positions, i, j, size):
    """Scores of block i of queries with block j of keys, `f32[R, K, H/K, size, size]`, and which of them count."""
    slots = jnp.arange(size)
    ends, key_positions, positions = (jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=1) for x, at in
                                      ((rows.end, j), (rows.positions, j), (positions, i)))
    seen = seen_by(rows, rows.query_slots(i * size + slots), (ends, key_positions), j * size + slots, positions)
    return capped(score_products(queries, _part(keys, j, size)), softcap), seen


def seen_by(rows: RowMask, slots, keys, key_slots, positions):
    """Whether queries see keys: `bool[R, 1, 1, t, u]`."""
    ends, key_positions = keys
    tree = (key_slots <= slots[:, None]) & (slots[:, None] < ends[:, None])
    return (tree & (positions[:, :, None] - key_positions[:, None] < rows.reach))[:, None, None]


def _part(x, i, size):
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=x.ndim - 2)


def _added(x, more, i, size):
    return jax.lax.dynamic_update_slice_in_dim(x, _part(x, i, size) + more, i * size, axis=x.ndim - 2)


def _joined(x):
    """Blocks `[n, ..., size, d]` as `[..., n size, d]`."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])

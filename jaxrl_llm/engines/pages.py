"""Paged caches on the device: a pool of pages, and the compiled programs that read, extend and copy them.

A row's places are cut into pages of `PAGE`, which lie anywhere in the pool; a table names them in order, and several rows may
name the same page. Page 0 belongs to nobody: what must not be kept is written there.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.engines import measures
from jaxrl_llm.engines.shards import of_rows
from jaxrl_llm.engines.slots import Drawn, Lanes, Weights, drawn_by, longer, through_layers
from jaxrl_llm.kernels import paged
from jaxrl_llm.models.attention import grouped_attention, rotations
from jaxrl_llm.models.transformer import Block, Transformer, heads_first, of_layers

PAGE = 16  # places; the kernels are tested with pages of this size

Pool = tuple[tuple[jax.Array | np.ndarray, ...], ...]  # each layer's keys and values, in the order of `paged.laid`


def empty(model: Transformer, pages: int) -> Pool:
    """A pool on the host, all zero."""
    c = model.config
    shape = jax.ShapeDtypeStruct((pages, PAGE, c.num_kv_heads, c.head_dim), model.dtype)
    one = jax.eval_shape(functools.partial(paged.laid, model.kernels), shape, shape)
    return tuple(tuple(np.zeros(x.shape, x.dtype) for x in one) for _ in range(c.num_layers))


def _pages(static) -> dict[str, int]:
    """The axis of pages in arrays that have them; each shard has pages for its rows."""
    axis = paged.page_axis(static["model"].kernels if "model" in static else static["kernels"])
    return {"pool": axis, "pages": axis}


@of_rows(static=("model", "steps", "transposed", "columns", "pieces"), donated=("pool",), same=("weights", "key", "patience"),
         axes=_pages, results=("pool", 0, 1))
def decode(model: Transformer, weights: Weights, pool: Pool, lanes: Lanes, table, key, patience, *, steps: int,
           transposed: bool, columns: tuple[str, ...] = (), pieces: int = 1) -> tuple[Pool, Lanes, Drawn]:
    """Decodes a chunk, as `slots.decode` does, for lanes whose places are in the pages `table i32[m, n]`.

    Each step writes a token into its page and reads the row's pages by the platform's kernel. Pages of all places that the
    chunk writes are in the table, and belong to one row alone.
    """
    c, block = model.config, Block(model.config, model.dtype, transposed, model.kernels)
    attention = functools.partial(paged.paged_attention, model.kernels, c.attention_softcap)
    if pieces > 1:  # no partitioner cuts the kernels
        heads = PartitionSpec(None, "tensor"), PartitionSpec(*[None] * paged.head_axis(model.kernels), "tensor")
        attention = jax.shard_map(attention, axis_names={"tensor"}, in_specs=(*heads, PartitionSpec(), PartitionSpec()),
                                  out_specs=heads[0], check_vma=False)
    tables = rotations(c, jnp.asarray(lanes.length)[:, None] + jnp.arange(steps))

    def states(lanes, i, pool):
        place = lanes.length + i
        page = jnp.where(lanes.alive, table[jnp.arange(len(table)), jnp.minimum(place // PAGE, table.shape[1] - 1)], 0)
        seen = jnp.where(lanes.alive, place + 1, 1)
        rotation = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1), tables)

        def attend(i, q, k, v):
            own = paged.written(model.kernels, pool[i], k[:, 0], v[:, 0], page, place % PAGE)
            return attention(q[:, 0] * c.attention_scale, own, table, seen)[:, None], own

        x, kept, seen = through_layers(model, block, weights, lanes.pending[:, None], rotation, attend, tally)
        return model.normed(weights.params, x[:, 0]), tuple(kept), *(() if tally is None else (of_layers(seen, 1),))

    tally = measures.tally(columns, c)
    pool, after, results = drawn_by(model, weights, lanes, key, patience, states, pool, steps, columns=columns, pieces=pieces)
    return pool, longer(lanes, after), results


@of_rows(static=("model", "transposed"), donated=("pool",), same=("weights",), axes=_pages, results="pool")
def extend(model: Transformer, weights: Weights, pool: Pool, table, length, count, tokens, *, transposed: bool) -> Pool:
    """Appends given tokens to some rows.

    Args:
      table: `i32[m, n]`, the pages of the rows; those of all places that are written belong to one row alone.
      length: `i32[m]`, number of filled places.
      tokens, count: `i32[m, W]`, of which the first `count i32[m]` of each row are real.
    """
    c, order = model.config, jnp.arange(tokens.shape[1])
    places = length[:, None] + order
    page = jnp.take_along_axis(table, jnp.minimum(places // PAGE, table.shape[1] - 1), axis=1)
    page, inside = jnp.where(order < count[:, None], page, 0).reshape(-1), (places % PAGE).reshape(-1)
    causal, before = (order[:, None] >= order)[None, None], jnp.arange(table.shape[1] * PAGE) < length[:, None, None, None]

    def attend(i, q, k, v):
        own = paged.written(model.kernels, pool[i], *(x.reshape(-1, *x.shape[2:]) for x in (k, v)), page, inside)
        shared = *paged.read(model.kernels, own, table), before
        out = grouped_attention(q[:, None], heads_first(k)[:, :, None], heads_first(v)[:, :, None], causal, shared,
                                scale=c.attention_scale, softcap=c.attention_softcap)
        return out[:, 0], own

    block = Block(c, model.dtype, transposed, model.kernels)
    return tuple(through_layers(model, block, weights, tokens, rotations(c, places), attend)[1])


@of_rows(static=("kernels",), donated=("pool",), axes=_pages, results="pool")
def copy(kernels: str, pool: Pool, source, to) -> Pool:
    """The pool with the pages `source i32[n]` copied into the pages `to i32[n]`."""
    return put(kernels, pool, take(kernels, pool, source), to)


@of_rows(static=("kernels",), axes=_pages, results="pool")
def take(kernels: str, pool: Pool, which) -> Pool:
    """A pool with copies of the pages `which i32[n]`."""
    axis = paged.page_axis(kernels)
    return jax.tree.map(lambda x: jnp.take(x, which, axis=axis), pool)


@of_rows(static=("kernels",), donated=("pool",), axes=_pages, results="pool")
def put(kernels: str, pool: Pool, pages: Pool, to) -> Pool:
    """The pool with the given pages in its pages `to i32[n]`."""
    where = (slice(None),) * paged.page_axis(kernels) + (to,)
    return jax.tree.map(lambda x, new: x.at[where].set(new), pool, pages)


@of_rows(static=("kernels", "pages"), axes=_pages, results="pool")
def lengthen(kernels: str, pool: Pool, *, pages: int) -> Pool:
    """The same pool with this number of pages."""
    axis = paged.page_axis(kernels)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, pages - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]), pool)

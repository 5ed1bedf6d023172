"""Row slots on the device: a cache for each row, and the compiled programs that fill, read and move them.

A row's positions are places in its cache: first the prompt, then the completion. The token after the last cached one is
`pending`: the next step reads it. Each row has all of its own, so it can stop, move and continue in any slot; lanes whose
caches begin alike read that part once.

A sliding-window layer keeps its last `near` places: position p is in place p mod `near`. Programs write beyond a row's last
token, and overwrite first what is there: `near` is the window and as many places more as they may write, so that every place
that a later token sees is still there.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engines import measures
from jaxrl_llm.engines.sampler import drawn_over, fold_in_halves, logits_of
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.engines.shards import of_rows
from jaxrl_llm.models.attention import Rotations, grouped_attention, held, in_window, rotations
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import (
    Block,
    Cached,
    CompletionCache,
    PromptCache,
    Transformer,
    heads_first,
    swap_last,
    tallied,
    with_places,
)


class Slots(NamedTuple):
    """Keys `[R, K, d, U]` and values `[R, K, U, d]` of R rows in caches of U places: L arrays each, filled from the left.

    Sliding-window layers have no more than `near` places.
    """

    keys: tuple[Cached, ...]
    values: tuple[Cached, ...]

    @property
    def rows(self) -> int:
        """R."""
        return self.values[0].shape[0]

    @property
    def room(self) -> int:
        """U, or `near` if all layers have windows."""
        return max(x.shape[2] for x in self.values)


class Weights(NamedTuple):
    """A policy, `params` and `lora`, and its form for decode steps: `Transformer.unstack_layers`, `unembedding [V, D]`."""

    params: Any
    lora: Any
    layers: Any
    unembedding: jax.Array


class Lanes(flax.struct.PyTreeNode):
    """The rows that a chunk decodes.

    Attributes:
      slot: `i32[m]`, the slot of each, all different; 0 to R - 1 if m is R.
      uid: `u32[m, 2]`, high and low half of the trajectory's number, or the two words of its key where it is `keyed bool[m]`.
      length: `i32[m]`, number of filled places.
      pending: `i32[m]`, the token after them.
      drawn, left: `i32[m]`, how many tokens the policy wrote in the trajectory, and how many it may still write.
      alive: `bool[m]`; others are inert.
      yields: `bool[m]`, whether another row may take the lane within a chunk once this one has ended.
      stops: `i32[m, N]`, tokens that end a row, filled up with -1.
      sampling: the distribution of each, arrays `[m]`.
    """

    slot: jax.Array | np.ndarray
    uid: jax.Array | np.ndarray
    keyed: jax.Array | np.ndarray
    length: jax.Array | np.ndarray
    pending: jax.Array | np.ndarray
    drawn: jax.Array | np.ndarray
    left: jax.Array | np.ndarray
    alive: jax.Array | np.ndarray
    yields: jax.Array | np.ndarray
    stops: jax.Array | np.ndarray
    sampling: Sampling


class Drawn(NamedTuple):
    """What a chunk drew: `[steps, m]` each. `mask` is True on tokens of living rows, the one that ends a row included.

    `columns`: further ones by name, `[steps, m, ...]`, those of routers of the token before, see `measures.drawn`.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    columns: dict[str, jax.Array]


def empty(model: Transformer, rows: int, room: int, near: int | None) -> Slots:
    """Slots on the host, all zero."""
    c = model.config
    slots = jax.eval_shape(lambda: Slots(*model.zeros((rows, c.num_kv_heads), c.places(room, near))))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), slots)


@functools.partial(jax.jit, static_argnames=("model", "transposed"))
def prepare(model: Transformer, params, lora, *, transposed: bool) -> Weights:
    """The weights as decoding reads them, sliced, cast and transposed once for all chunks."""
    return Weights(params, lora, model.unstack_layers(params, lora, transposed=transposed),
                   model.unembedding(params).astype(model.dtype))


def with_adapters(model: Transformer, weights: Weights, lora, *, transposed: bool) -> Weights:
    """Prepared weights with other adapters; the prepared base weights stay unchanged."""
    adapters = _adapters(model, lora, transposed=transposed)
    return weights._replace(lora=lora, layers=[(own, other) for (own, _), other in zip(weights.layers, adapters, strict=True)])


@functools.partial(jax.jit, static_argnames=("model", "transposed"))
def _adapters(model: Transformer, lora, *, transposed: bool):
    return [adapters for _, adapters in model.unstack_layers({"layers": {}}, lora, transposed=transposed)]


@of_rows(static=("model", "steps", "common", "near", "transposed", "columns", "pieces"), donated=("slots",),
         same=("weights", "key", "patience"), results=(0, 0, 1))
def decode(model: Transformer, weights: Weights, slots: Slots, lanes: Lanes, key, patience, leaders, *, steps: int, common: int,
           near: int | None, transposed: bool, columns: tuple[str, ...] = (), pieces: int = 1) -> tuple[Slots, Lanes, Drawn]:
    """Decodes a chunk of up to `steps` steps for some of the rows.

    Within the chunk the rows' caches are only read; what it adds goes into a small separate cache, which is appended to them at
    the end. A row that ends is inert from then on. The chunk ends with its last row, or once the steps that inert rows took
    part in, summed over these rows, exceed `patience i32[]`. The slots need room for what rows may still draw.

    Each of B runs of consecutive lanes shares its first `common` places, except those of sliding-window layers; they are read
    from the slot `leaders i32[B]`.  `columns`: names of further token columns to measure.  `pieces`: number of devices over
    which the compiler shards matrices and heads.
    """
    every = lanes.slot.shape[0] == slots.rows
    own = slots if every else jax.tree.map(lambda x: x[lanes.slot], slots)
    first, own = _parted(model.config, slots, own, leaders, common)
    seen = jnp.arange(common, slots.room) < lanes.length[:, None]
    prompt = PromptCache(own.keys, own.values, seen, jnp.asarray(lanes.length))

    def states(lanes, i, cache):
        normed, cache, *read = model.decode_step(weights.params, weights.layers, lanes.pending[:, None], i, prompt, cache,
                                                 common=first, transposed=transposed, tally=tally)
        return normed[:, 0], cache, *of_lanes(read)

    tally = measures.tally(columns, model.config)
    added, after, results = drawn_by(model, weights, lanes, key, patience, states, chunk_cache(model, lanes.length, steps),
                                     steps, columns=columns, pieces=pieces)
    slots = appended(model.config, slots, block_of(added), lanes.slot, lanes.length, near)
    return slots, longer(lanes, after), results


def of_lanes(read: list) -> list:
    """What a decode step kept of routers, `[m, 1, L, ...]`, without the axis of groups."""
    return jax.tree.map(lambda x: x[:, 0], read)


def drawn_by(model: Transformer, weights: Weights, lanes: Lanes, key, patience, states: Callable, cache, steps: int,
             enter: Callable | None = None, columns: tuple[str, ...] = (), pieces: int = 1) -> tuple[Any, Lanes, Drawn]:
    """The loop of a chunk, see `decode`: the cache and the lanes after it, still with the `length` they had, and what it drew.

    `states(lanes, i, cache) -> (normed [m, D], cache)` reads a token in each lane in step i, and returns third what it kept of
    routers, if `columns` ask for that; `enter(i, lanes, keys, cache)`
    returns the last three with other rows in some lanes from step i on, which is then run: each draws a token at least.
    """
    step = functools.partial(step_of, model, weights, states, columns, pieces)

    def go_on(state):
        i, inert, now, *_ = state
        return (i < steps) & (inert <= patience) & now.alive.any()

    def body(state):
        i, inert, now, keys, cache, drawn = state
        if enter is not None:
            now, keys, cache = enter(i, now, keys, cache)
        inert += (lanes.alive & ~now.alive).sum(dtype=jnp.int32)
        now, cache, new = step(i, now, keys, cache)
        drawn = jax.tree.map(lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0), drawn, new)
        return i + 1, inert, now, keys, cache, drawn

    now, keys = jax.tree.map(jnp.asarray, lanes), keys_of(lanes, key)
    buffers = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), jax.eval_shape(step, 0, now, keys, cache)[2])
    _, _, now, _, cache, results = jax.lax.while_loop(go_on, body, (0, jnp.int32(0), now, keys, cache, buffers))
    return cache, now, results


def keys_of(lanes: Lanes, key) -> jax.Array:
    """The keys `[m]` of the rows of lanes."""
    given = jax.random.wrap_key_data(jnp.asarray(lanes.uid), impl=jax.random.key_impl(key))
    return jnp.where(lanes.keyed, given, fold_in_halves(key, *lanes.uid.T))


def longer(before: Lanes, after: Lanes) -> Lanes:
    """The lanes after a chunk, whose `length` counts what it drew."""
    return after.replace(length=before.length + after.drawn - before.drawn)


def _parted(c: ModelConfig, slots: Slots, own: Slots, leaders, common: int) -> tuple[Any, Slots]:
    """The first `common` places of the leaders, None for none, and the lanes' places behind them.

    Sliding-window layers remain whole: they have None as first places.
    """
    if not common:
        return None, own
    def split(keys, values, own_keys, own_values, local):
        if local:
            return None, None, own_keys, own_values
        def first(x, axis):
            return jax.tree.map(lambda y: jax.lax.slice_in_dim(y, 0, common, axis=axis)[leaders], x)
        def rest(x, axis):
            return jax.tree.map(lambda y: jax.lax.slice_in_dim(y, common, y.shape[axis], axis=axis), x)
        return first(keys, 3), first(values, 2), rest(own_keys, 3), rest(own_values, 2)
    keys, values, *own = zip(*map(split, *slots, *own, c.local_layers))
    return (keys, values), Slots(*own)


def chunk_cache(model: Transformer, length, steps: int) -> CompletionCache:
    """The small cache of a chunk of steps, each row being a group of one."""
    c = model.config
    keys, values = model.zeros((len(length), c.num_kv_heads, 1), (steps,) * c.num_layers)
    return CompletionCache(keys, values, rotations(c, length[:, None] + jnp.arange(steps)))


def block_of(chunk: CompletionCache) -> Slots:
    """What a chunk adds to the slots, m rows."""
    return Slots(*jax.tree.map(lambda x: x[:, :, 0], (chunk.keys, chunk.values)))


def step_of(model: Transformer, weights: Weights, states: Callable, columns: tuple[str, ...], pieces: int, i, lanes: Lanes,
            keys, cache) -> tuple[Lanes, Any, Drawn]:
    """Step `i` of a chunk; token t of a row is drawn with `fold_in(its key, t)`, as `sampler.generate` does."""
    normed, cache, *read = states(lanes, i, cache)
    logits = model.finished(logits_of(normed, weights.unembedding, pieces))
    drawn = drawn_over(pieces, jax.vmap(jax.random.fold_in)(keys, lanes.drawn), logits, lanes.sampling)
    token, logprob, entropy = drawn
    alive = jnp.asarray(lanes.alive)
    ended = (token[:, None] == lanes.stops).any(-1) | (lanes.left <= 1)
    after = lanes.replace(pending=jnp.where(alive, token, lanes.pending), drawn=lanes.drawn + alive, left=lanes.left - alive,
                          alive=alive & ~ended)
    measured = measures.drawn(columns, model.config, logits, token, *(read or [None]))
    return after, cache, Drawn(token, alive, logprob, entropy, measured)


@of_rows(static=("model", "near", "transposed"), donated=("slots",), same=("weights",))
def extend(model: Transformer, weights: Weights, slots: Slots, slot, length, tokens, *, near: int | None,
           transposed: bool) -> Slots:
    """Appends given tokens to some rows.

    Args:
      slot: `i32[m]`, the rows; R means no row.
      length: `i32[m]`, number of filled places.
      tokens: `i32[m, W]`; the caller keeps count of those that are real, the rest is overwritten later. All rows need room
        for the real ones, and slots have W places at least.
    """
    c = model.config
    own = jax.tree.map(lambda x: jnp.take(x, slot, axis=0, mode="clip"), slots)
    order = jnp.arange(tokens.shape[1])
    positions = length[:, None] + order

    def attend(i, q, k, v):
        k, v, local = heads_first(k), heads_first(v), c.local_layers[i]
        causal = (order[:, None] >= order) & in_window(positions, positions, c.window, local)
        there = held(length, own.values[i].shape[2])
        seen = (there >= 0)[:, None] & in_window(positions, there, c.window, local)
        before = swap_last(own.keys[i]), own.values[i], seen[:, None]
        out = grouped_attention(q[:, None], k[:, :, None], v[:, :, None], causal[:, None], before,
                                scale=c.attention_scale, softcap=c.attention_softcap)
        return out[:, 0], (swap_last(k), v)

    _, kept, _ = through_layers(model, Block(c, model.dtype, transposed), weights, tokens, rotations(c, positions), attend)
    return appended(c, slots, Slots(*model.cached(*zip(*kept))), slot, length, near)


def through_layers(model: Transformer, block: Block, weights: Weights, tokens, tables: Rotations, attend: Callable, tally=None
                   ) -> tuple[jax.Array, list, list]:
    """Residual streams `[m, W, D]` of `tokens i32[m, W]` behind all layers, and what is kept of each layer.

    That is what `attend(i, q, k, v)` keeps of layer i, and what `tally` keeps of its router, see `models.transformer.tallied`.
    """
    c, x, kept, seen = model.config, model.embed(weights.params, tokens), [], []
    for i, (kernels, adapters) in enumerate(weights.layers):
        variables = {"params": kernels} if adapters is None else {"params": kernels, "lora": adapters}
        rotation = tables.of_layer(c.local_layers[i], None if c.rotary_layers[i] else False)
        (x, one), routed = tallied(block, tally, variables, x, rotation, functools.partial(attend, i))
        kept.append(one)
        seen.append(routed)
    return x, kept, seen


@of_rows(static=("model", "room", "near"), same=("weights",))
def prefill(model: Transformer, weights: Weights, tokens, *, room: int, near: int | None) -> Slots:
    """Slots of `room` places each whose rows have read `tokens i32[m, W]`; it loops over the layers, which compiles fast.

    W must be at most `near`.
    """
    _, (keys, values), _ = model.hidden_states(weights.params, tokens, jnp.ones(tokens.shape, bool), lora=weights.lora)
    return Slots(*with_places(*model.cached(tuple(swap_last(keys)), tuple(values)), model.config.places(room, near)))


@of_rows(static=("room",), same=("slot",))
def take(slots: Slots, slot, *, room: int) -> Slots:
    """A copy of the first `room` places of one row, `[1, K, ...]`; of each shard with a mesh."""
    def row(arrays, axis):
        return jax.tree.map(lambda x: jax.lax.slice_in_dim(jax.lax.dynamic_slice_in_dim(x, slot, 1), 0,
                                                           min(room, x.shape[axis]), axis=axis), arrays)
    return Slots(row(slots.keys, 3), row(slots.values, 2))


@of_rows(static=())
def pick(block: Slots, which) -> Slots:
    """Slots with copies of the rows `which i32[m]` of a block."""
    return jax.tree.map(lambda x: x[which], block)


@of_rows(static=(), donated=("slots",))
def put(slots: Slots, block: Slots | None, which, slot) -> Slots:
    """The slots with the rows `which i32[n]` of `block`, None for themselves, copied into the rows `slot i32[n]`.

    R means no row.
    """
    copied, start = jax.tree.map(lambda x: x[which], slots if block is None else block), jnp.zeros_like(slot)
    return Slots(_written(slots.keys, copied.keys, 3, slot, start), _written(slots.values, copied.values, 2, slot, start))


@of_rows(static=("model", "room", "near"))
def lengthen(model: Transformer, slots: Slots, *, room: int, near: int | None) -> Slots:
    """The same slots with `room` places each."""
    return Slots(*with_places(*slots, model.config.places(room, near)))


def appended(c: ModelConfig, slots: Slots, block: Slots, slot, length, near: int | None) -> Slots:
    """The slots with `block` (m rows of W places) behind the first `length i32[m]` tokens of the rows `slot i32[m]`.

    Rows that do not exist are skipped, and places for which a row has no room.
    """
    def append(keys, values, new_keys, new_values, local):
        write = functools.partial(_around, near=near) if local else _behind
        return write(keys, new_keys, 3, slot, length), write(values, new_values, 2, slot, length)

    return Slots(*zip(*map(append, *slots, *block, c.local_layers)))


def _around(old, new, axis: int, slot, length, near: int | None):
    """`old [R, ...]` with W positions of `new [m, ...]` from position `length` on, p in place p mod `near` of its `axis`."""
    positions = length[:, None] + jnp.arange(new.shape[axis])
    where = slot[:, None], *[slice(None)] * (axis - 1), positions % near
    return jax.tree.map(lambda x, y: x.at[where].set(jnp.moveaxis(y, axis, 1), mode="drop"), old, new)


def _behind(old, new, axis: int, slot, length):
    """`old [R, ...]` with as many of the W places of `new [m, ...]` as fit, from place `length i32[m]` of `axis` on."""
    width = jax.tree.leaves(new)[0].shape[axis]
    start = jnp.minimum(length, jax.tree.leaves(old)[0].shape[axis] - width)
    before = (length - start)[:, None, None, None]  # places of the last W that are filled already

    def fitting(old, new):
        def window(slot, start):
            first = [slot, *(start if i == axis else 0 for i in range(1, old.ndim))]
            return jax.lax.dynamic_slice(old, first, (1, *new.shape[1:]))[0]
        there, moved = jax.vmap(window)(slot, start), turned(new, width - (length - start), axis)
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, new.shape, axis) < before, there, moved)

    new = jax.lax.cond((length > start).any(), functools.partial(jax.tree.map, fitting), lambda _, new: new, old, new)
    return _written(old, new, axis, slot, start)


def turned(x, first, axis: int):
    """`x [m, ...]` whose places along an axis begin at `first i32[m]` and go round."""
    turn = jax.vmap(lambda y, n: jax.lax.dynamic_slice_in_dim(y, n, x.shape[axis], axis - 1))
    return turn(jnp.concatenate([x, x], axis), first)


def _written(old, new, axis: int, slot, offset):
    """`old [R, ...]` with the W places of `new [m, ...]` in the rows `slot i32[m]` from place `offset i32[m]` of `axis` on.

    A row that does not exist is skipped.
    """
    axes = jax.lax.ScatterDimensionNumbers(update_window_dims=(1, 2, 3), inserted_window_dims=(0,),
                                           scatter_dims_to_operand_dims=(0, axis))
    where, mode = jnp.stack([slot, offset], axis=1), jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.tree.map(lambda x, y: jax.lax.scatter(x, where, y, axes, mode=mode), old, new)

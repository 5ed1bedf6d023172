"""Chunks in which waiting rows take the lanes of rows that end: no lane idles until the host looks at it again."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engines import measures
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.engines.slots import (
    Drawn,
    Lanes,
    Slots,
    Weights,
    appended,
    block_of,
    chunk_cache,
    drawn_by,
    keys_of,
    longer,
    of_lanes,
    turned,
)
from jaxrl_llm.models.attention import rotations
from jaxrl_llm.models.transformer import CompletionCache, PromptCache, Transformer


class Reserve(NamedTuple):
    """Rows that wait for a lane, the first to get one first.

    block: the caches of their prompts.
    lanes: what a lane needs to know about each of N rows; `slot` is its row of the block, `alive` is False behind the last one.
    first: `i32[]`, number of the first row, counted through the chunks that follow each other.
    """

    block: Slots
    lanes: Lanes
    first: np.int32


class Following(NamedTuple):
    """The rows of a reserve, and how many rows have entered before the chunk, `i32[]`, in those that it follows."""

    rows: list[Row]
    reserve: Reserve
    entered: jax.Array | np.int32


class Entries(NamedTuple):
    """The lanes `i32[N]` that rows of a reserve got in a chunk, and before which of its steps `i32[N]`.

    They are those with the numbers `begin i32[]` to `end i32[]`, the latter not included.
    """

    lane: jax.Array
    step: jax.Array
    begin: jax.Array
    end: jax.Array


class _Caches(NamedTuple):
    """What a chunk reads: the slots and its own small cache; the entries.

    begun, drawn: `i32[R]`, where each lane's row begins in the small cache, and how many tokens it had drawn there.
    """

    slots: Slots
    chunk: CompletionCache
    begun: jax.Array
    drawn: jax.Array
    entries: Entries


@functools.partial(jax.jit, static_argnames=("model", "steps", "transposed", "columns"), donate_argnames=("slots",))
def decode(model: Transformer, weights: Weights, slots: Slots, lanes: Lanes, key, patience, reserve: Reserve, entered, *,
           steps: int, transposed: bool, columns: tuple[str, ...] = ()) -> tuple[Slots, Lanes, Drawn, Entries]:
    """Decodes a chunk as `slots.decode` does, for all slots of a model without sliding windows.

    Before each step rows of the reserve take the lanes that yield and whose rows have ended, from the row with the number
    `entered i32[]` on; their prompts are copied into the slots, which need room for what these rows may draw too. The chunk
    ends when all rows have ended at once: the next one then begins with short caches.
    """
    def states(lanes, i, caches):
        prompt = PromptCache(*caches.slots, jnp.arange(slots.room) < lanes.length[:, None], lanes.length)
        normed, chunk, *read = model.decode_step(weights.params, weights.layers, lanes.pending[:, None], i, prompt,
                                                 caches.chunk, begun=caches.begun, transposed=transposed, tally=tally)
        return normed[:, 0], caches._replace(chunk=chunk), *of_lanes(read)

    tally = measures.tally(columns, model.config)
    enter = functools.partial(_enter, model, reserve._replace(lanes=jax.tree.map(jnp.asarray, reserve.lanes)),
                              keys_of(reserve.lanes, key))
    nobody = jnp.zeros(reserve.lanes.slot.shape, jnp.int32)
    caches = _Caches(slots, chunk_cache(model, lanes.length, steps), jnp.zeros_like(lanes.length), jnp.asarray(lanes.drawn),
                     Entries(nobody, nobody, jnp.asarray(entered), jnp.asarray(entered)))
    caches, after, drawn = drawn_by(model, weights, lanes, key, patience, states, caches, steps, enter, columns)
    keys, values = block_of(caches.chunk)
    block = Slots(jax.tree.map(lambda x: turned(x, caches.begun, 3), keys),
                  jax.tree.map(lambda x: turned(x, caches.begun, 2), values))
    slots = appended(model.config, caches.slots, block, lanes.slot, after.length, None)
    return slots, longer(after.replace(drawn=caches.drawn), after), drawn, caches.entries


def _enter(model: Transformer, reserve: Reserve, reserve_keys, i, lanes: Lanes, keys, caches: _Caches):
    """The lanes, their keys and the caches with rows of the reserve in lanes that yield, from step i on."""
    last = reserve.first + reserve.lanes.alive.sum(dtype=jnp.int32)

    def more(state):
        lanes, _, caches = state
        return (caches.entries.end < last) & (lanes.yields & ~lanes.alive).any()

    def one(state):
        lanes, keys, (slots, chunk, begun, drawn, entries) = state
        lane, n = jnp.argmax(lanes.yields & ~lanes.alive), entries.end - reserve.first
        new = jax.tree.map(lambda x: x[n], reserve.lanes)
        lanes = jax.tree.map(lambda x, y: x.at[lane].set(y), lanes, new.replace(slot=lane))
        entries = Entries(entries.lane.at[n].set(lane), entries.step.at[n].set(i), entries.begin, entries.end + 1)
        return lanes, keys.at[lane].set(reserve_keys[n]), _Caches(
            _with_prompt(slots, lane, reserve.block, new.slot), _rotating_from(model, chunk, lane, new.length - i),
            begun.at[lane].set(i), drawn.at[lane].set(new.drawn), entries)

    return jax.lax.while_loop(more, one, (lanes, keys, caches))


def _with_prompt(slots: Slots, slot, block: Slots, row) -> Slots:
    """The slots with a row of the block in one of them."""
    def copied(old, new, axis):
        places = min(old.shape[axis], new.shape[axis])
        one = jax.lax.slice_in_dim(jax.lax.dynamic_slice_in_dim(new, row, 1), 0, places, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(old, one, slot, 0)
    keys = jax.tree.map(functools.partial(copied, axis=3), slots.keys, block.keys)
    return Slots(keys, jax.tree.map(functools.partial(copied, axis=2), slots.values, block.values))


def _rotating_from(model: Transformer, chunk: CompletionCache, lane, first) -> CompletionCache:
    """The chunk's cache with the rotations of a lane whose first place is position `first`."""
    steps = chunk.rotations.full[0].shape[1]
    own = rotations(model.config, (first + jnp.arange(steps))[None])
    return chunk._replace(rotations=jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, lane, 0), chunk.rotations, own))

"""A ring of rows on the device that forgets the oldest prompt groups as a whole: a sliding window in static shapes."""
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class Buffer(struct.PyTreeNode):
    """N rows, some of them in use.

    Attributes:
      rows: pytree of arrays `[N, ...]`.
      group: `i32[N]`, serial number of the prompt group a row belongs to, in order of arrival; -1 for an empty slot.
      cursor: `i32[]`, the slot that is written next.
      seen: `i32[]`, groups that arrived so far.
    """

    rows: Any
    group: Array
    cursor: Array
    seen: Array

    @property
    def real(self) -> Array:
        """bool[N]: slots in use."""
        return self.group >= 0


def empty(capacity: int, row: Any) -> Buffer:
    """A buffer of `capacity` rows, each like `row` (a pytree of arrays or `jax.ShapeDtypeStruct` for one row)."""
    if capacity < 1:
        raise ValueError(f"capacity={capacity} rows; a buffer needs at least one")
    rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), row)
    return Buffer(rows, jnp.full(capacity, -1, jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def append(buffer: Buffer, rows: Any, valid: Array) -> Buffer:
    """Adds the valid rows (`valid bool[P, G]`, leaves `[P, G, ...]`), prompt after prompt, and evicts whole old groups.

    A group that loses a row loses all of them; of a batch larger than the buffer, the last complete groups stay. Raises
    ValueError: at trace time, when one group could not fit.
    """
    (P, G), N = valid.shape, buffer.group.shape[0]
    if G > N:
        raise ValueError(f"groups of {G} rollouts do not fit into a buffer of capacity={N} rows; raise the capacity")
    sizes = jnp.sum(valid, axis=1, dtype=jnp.int32)
    serial = buffer.seen + jnp.cumsum(sizes > 0, dtype=jnp.int32) - 1
    from_here_on = jnp.flip(jnp.cumsum(jnp.flip(sizes)))  # rows of this group and of those after it
    kept = (valid & (from_here_on <= N)[:, None]).reshape(-1)
    count = jnp.sum(kept, dtype=jnp.int32)
    slot = (buffer.cursor + jnp.cumsum(kept, dtype=jnp.int32) - 1) % N
    slot = jnp.where(kept, slot, N)  # beyond the end: dropped by the scatter

    overwritten = (jnp.arange(N) - buffer.cursor) % N < count
    evicted = jnp.max(jnp.where(overwritten, buffer.group, -1))
    group = jnp.where(buffer.group > evicted, buffer.group, -1)
    def write(old, new):
        return old.at[slot].set(new.reshape(P * G, *new.shape[2:]).astype(old.dtype), mode="drop")
    return Buffer(jax.tree.map(write, buffer.rows, rows), write(group, jnp.broadcast_to(serial[:, None], (P, G))),
                  (buffer.cursor + count) % N, buffer.seen + jnp.sum(sizes > 0, dtype=jnp.int32))

"""Numbers and states of packed rows `[R, N]`, read by the index of a view; a mesh may cut the rows over `seq`.

Slots are counted through `[R, N]`. Each shard adds up what an index names of its own slots, and the shards' sums are added.
"""
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh


def cut_axis(mesh: Mesh | None) -> str | None:
    """The axis over which the mesh cuts rows, if there is one."""
    return "seq" if mesh is not None and mesh.shape["seq"] > 1 else None


def inside(index: Array, slots: int) -> Array:
    """bool: entries of an index that name one of this number of slots."""
    return (index >= 0) & (index < slots)


def seen(numbers: Array, index: Array) -> Array:
    """The `numbers [R, N]` that an index `i32[...]` names; 0 where it is outside these rows."""
    places = jnp.where(inside(index, numbers.size), index, numbers.size)
    return jnp.take(numbers.reshape(-1), places, mode="fill", fill_value=0)


def before(places: Array | np.ndarray, index: Array) -> Array:
    """The index of what predicts the tokens of an index, from `PackedRows.before i32[R, N]`; -1 outside these rows."""
    R, N = places.shape
    return jnp.where(inside(index, places.size), seen(jnp.asarray(places) + N * jnp.arange(R)[:, None], index), -1)


def numbered(R: int, N: int) -> Array:
    """i32[R, N], the number of each slot, which the rows of a shard take along."""
    return jnp.arange(R * N, dtype=jnp.int32).reshape(R, N)


def sums(states: Array, number: Array, length: int, index: Array) -> Array:
    """f32[1, 1, ..., D]: the sum over `index i32[..., n]` of the states that it names in a shard; no `[..., n, D]` is made.

    `states [r, n, D]` and `number i32[r, n]` are the shard's own, `length` is the N of whole rows.
    """
    r, n = number.shape
    row, place = index // length - number[0, 0] // length, index % length - number[0, 0] % length
    here = (index >= 0) & (row >= 0) & (row < r) & (place >= 0) & (place < n)
    flat = states.reshape(r * n, -1)

    def add(total, inputs):
        at, real = inputs
        return total + jnp.where(real[..., None], flat[at].astype(jnp.float32), 0), None

    inputs = jnp.moveaxis(jnp.where(here, row * n + place, 0), -1, 0), jnp.moveaxis(here, -1, 0)
    return jax.lax.scan(add, jnp.zeros((*index.shape[:-1], flat.shape[-1])), inputs)[0][None, None]

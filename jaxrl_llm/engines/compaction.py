"""Drops finished rows from decoding: half of a batch, chosen so that it holds every unfinished row."""
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Half(NamedTuple):
    """Which rows of `[P, G]` make up a batch of half the size, `[P, G/2]`, or `[ceil(P/2), G]` where G is odd.

    Groups of an even size are cut in two, unfinished rows first, so that many prompts with few unfinished rows fit, and few
    prompts with many. Rows of one prompt stay side by side and keep sharing its cache.

    prompts: i32[P'], the prompt of each (half) group; it may come twice.
    rows: i32[P', G'], the rows of that prompt; none comes twice.
    """

    prompts: jax.Array
    rows: jax.Array

    def take(self, x):
        """`[P, G, ...] -> [P', G', ...]`."""
        return x[self.prompts[:, None], self.rows]

    def put(self, x, half):
        """`x [P, G, ...]` with `half [P', G', ...]` in the places that `take` took it from."""
        return x.at[self.prompts[:, None], self.rows].set(half, unique_indices=True)


def half(alive: jax.Array) -> Half:
    """The half that contains all unfinished rows (`alive bool[P, G]`), provided that `holds(alive)`."""
    parts, living = _parts(alive)
    rows = jnp.argsort(~alive, axis=1).reshape(living.size, -1)
    kept = jnp.argsort(~living.reshape(-1))[:_count(living)]
    return Half(kept // parts, rows[kept])


def holds(alive: jax.Array) -> jax.Array:
    """`bool[]`: whether all unfinished rows (`alive bool[P, G]`) fit into half a batch."""
    _, living = _parts(alive)
    return living.sum() <= _count(living)


def _parts(alive):
    """The number of parts of a group, and which parts have an unfinished row, `bool[P, parts]`, once such rows come first."""
    parts = 1 if alive.shape[1] % 2 else 2
    before = jnp.arange(parts) * (alive.shape[1] // parts)
    return parts, alive.sum(1, keepdims=True) > before


def _count(living) -> int:
    return -(-living.size // 2)

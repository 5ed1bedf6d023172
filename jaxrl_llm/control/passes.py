"""Passes through the training problems: each remaining problem comes once before any comes again."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Walk(NamedTuple):
    """`visits` i32[N] of each problem, `ids` i32[B] of the next batch (below 0: none), `seed` u32[2], `step` i32[]."""

    visits: Array
    ids: Array
    seed: Array
    step: Array


def start(prompts: int, batch: int, seed: Array, kept_N: Array | None = None) -> Walk:
    """The walk before the first step; `kept_N` bool[N]: the problems to walk through; None: all."""
    walk = Walk(jnp.zeros(prompts, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.asarray(seed), jnp.int32(0))
    kept_N = jnp.ones(prompts, bool) if kept_N is None else kept_N
    return walk._replace(ids=least_visited(key_of(seed, walk.step), walk.visits, kept_N, batch))


def advance(walk: Walk, tried_N: Array, kept_N: Array) -> Walk:
    """The walk after a step with `tried_N` i32[N] sampled rollouts of each problem; the problems `kept_N` bool[N] remain.

    Proposed problems count as visited, even if their prompts were too long to be sampled.
    """
    proposed = jnp.zeros(walk.visits.size, bool).at[jnp.where(walk.ids < 0, walk.visits.size, walk.ids)].set(True, mode="drop")
    visits, step = walk.visits + (proposed | (tried_N > 0)), walk.step + 1
    ids = least_visited(key_of(walk.seed, step), visits, kept_N, walk.ids.size)
    return Walk(visits, ids, walk.seed, step)


def key_of(seed: Array, step: Array) -> Array:
    """The random key of a step, from `seed` u32[2]."""
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed)), step)


@functools.partial(jax.jit, static_argnums=3)
def least_visited(key: Array, visits_N: Array, kept_N: Array, count: int) -> Array:
    """i32[count]: the problems with the fewest visits among those where `kept_N`, ties at random; -1 if there are no more."""
    order = jnp.lexsort((jax.random.uniform(key, visits_N.shape), visits_N, ~kept_N))
    ids = jnp.where(kept_N[order], order, -1).astype(jnp.int32)[:count]
    return jnp.pad(ids, (0, count - ids.size), constant_values=-1)

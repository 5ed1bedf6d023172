"""Walking through the training problems in passes: each of those that are left once before one comes again."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Walk(NamedTuple):
    """`visits` i32[N] of each problem, `ids` i32[B] of the next batch (below 0: nobody), `seed` u32[2], `step` i32[]."""

    visits: Array
    ids: Array
    seed: Array
    step: Array


def start(prompts: int, batch: int, seed: Array, kept_N: Array | None = None) -> Walk:
    """Before the first step; `kept_N` bool[N]: the problems that are walked through, all if it is None."""
    walk = Walk(jnp.zeros(prompts, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.asarray(seed), jnp.int32(0))
    kept_N = jnp.ones(prompts, bool) if kept_N is None else kept_N
    return walk._replace(ids=least_visited(key_of(seed, walk.step), walk.visits, kept_N, batch))


def advance(walk: Walk, tried_N: Array, kept_N: Array) -> Walk:
    """After a step in which `tried_N` i32[N] rollouts of each problem were sampled; `kept_N` bool[N] are left.

    Problems that were proposed count as visited, also where their prompts were too long to be asked.
    """
    proposed = jnp.zeros(walk.visits.size, bool).at[jnp.where(walk.ids < 0, walk.visits.size, walk.ids)].set(True, mode="drop")
    visits, step = walk.visits + (proposed | (tried_N > 0)), walk.step + 1
    ids = least_visited(key_of(walk.seed, step), visits, kept_N, walk.ids.size)
    return Walk(visits, ids, walk.seed, step)


def key_of(seed: Array, step: Array) -> Array:
    """The key of a step, of `seed` u32[2]."""
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed)), step)


@functools.partial(jax.jit, static_argnums=3)
def least_visited(key: Array, visits_N: Array, kept_N: Array, count: int) -> Array:
    """i32[count]: of the problems where `kept_N`, those with the fewest visits, ties at random; -1 where there are no more."""
    order = jnp.lexsort((jax.random.uniform(key, visits_N.shape), visits_N, ~kept_N))
    found = jnp.where(kept_N[order], order, -1).astype(jnp.int32)[:count]
    return jnp.pad(found, (0, count - found.size), constant_values=-1)

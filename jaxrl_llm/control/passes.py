"""Passes through the training problems: each remaining problem of a task comes once before one of them comes again."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Shares(NamedTuple):
    """`tasks` i32[N], the task of each training problem, and `weights` f32[T] of the tasks, in proportion to their shares."""

    tasks: Array | np.ndarray
    weights: Array | np.ndarray

    @property
    def problems(self) -> int:
        """N."""
        return len(self.tasks)


class Walk(NamedTuple):
    """`visits` i32[N] of each problem, `ids` i32[B] of the next batch (below 0: none), `seed` u32[2], `step` i32[]."""

    visits: Array
    ids: Array
    seed: Array
    step: Array
    shares: Shares


def start(shares: Shares, batch: int, seed: Array, kept_N: Array | None = None) -> Walk:
    """The walk before the first step; `kept_N` bool[N]: the problems to walk through; None: all."""
    count = shares.problems
    walk = Walk(jnp.zeros(count, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.asarray(seed), jnp.int32(0), shares)
    kept_N = jnp.ones(count, bool) if kept_N is None else kept_N
    return walk._replace(ids=least_visited(key_of(seed, walk.step), walk.visits, kept_N, shares, batch))


def advance(walk: Walk, tried_N: Array, kept_N: Array) -> Walk:
    """The walk after a step with `tried_N` i32[N] sampled rollouts of each problem; the problems `kept_N` bool[N] remain.

    Proposed problems count as visited, even if their prompts were too long to be sampled.
    """
    proposed = jnp.zeros(walk.visits.size, bool).at[jnp.where(walk.ids < 0, walk.visits.size, walk.ids)].set(True, mode="drop")
    visits, step = walk.visits + (proposed | (tried_N > 0)), walk.step + 1
    ids = least_visited(key_of(walk.seed, step), visits, kept_N, walk.shares, walk.ids.size)
    return walk._replace(visits=visits, ids=ids, step=step)


def narrowed(walk: Walk, kept_N: Array) -> Walk:
    """The walk with its next batch chosen again, among the problems `kept_N` bool[N]."""
    ids = least_visited(key_of(walk.seed, walk.step), walk.visits, kept_N, walk.shares, walk.ids.size)
    return walk._replace(ids=ids)


def key_of(seed: Array, step: Array) -> Array:
    """The random key of a step, from `seed` u32[2]."""
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed)), step)


@functools.partial(jax.jit, static_argnums=4)
def least_visited(key: Array, visits_N: Array, kept_N: Array, shares: Shares, count: int) -> Array:
    """i32[count]: problems among those where `kept_N`, each task's share; -1 if there are no more.

    Of each task they are those with the fewest visits, ties at random.
    """
    order = jnp.lexsort((jax.random.uniform(key, visits_N.shape), visits_N, ~kept_N))
    return first_of(jax.random.fold_in(key, 1), order, kept_N, shares, count)


def first_of(key: Array, order: Array, kept_N: Array, shares: Shares, count: int) -> Array:
    """i32[count]: the first problems of an `order` i32[N] in which each task has its share; -1 if there are no more.

    Each task has its share of `count` rounded up or down, and exactly its share in the mean over keys (systematic sampling).
    What a task cannot fill goes to the others. With one task this is the order itself. Problems that are not `kept_N` bool[N]
    never come.
    """
    tasks, kept, weights = jnp.asarray(shares.tasks)[order], kept_N[order], jnp.asarray(shares.weights)
    size = jnp.zeros(len(weights), jnp.int32).at[tasks].add(1)
    grouped = jnp.lexsort((~kept, tasks))  # stable: problems of a task stay in order
    rank = jnp.zeros_like(order).at[grouped].set(jnp.arange(order.size) - (jnp.cumsum(size) - size)[tasks[grouped]])
    filled = jnp.zeros(len(weights), bool).at[tasks].max(kept)
    until = jnp.cumsum(jnp.where(filled, weights, 0))
    ends = jnp.floor(count * until / until[-1] + jax.random.uniform(key))
    quota = jnp.diff(ends, prepend=0.0)
    time = jnp.where(rank < quota[tasks], 0, 1 + rank) / weights[tasks]
    place = jnp.argsort(jnp.where(kept, time, jnp.inf), stable=True)[:count]
    ids = jnp.where(kept[place], order[place], -1).astype(jnp.int32)
    return jnp.pad(ids, (0, count - ids.size), constant_values=-1)

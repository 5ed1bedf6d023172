"""Batches with equally many problems of each task (QwenLong-L1.5, arXiv 2512.12967)."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class Shelves(NamedTuple):
    """For each of N problems: visits and task, i32[N]; `ids` i32[B] come next, `seed` u32[2], `step` i32[]; `tasks` i32[L]."""

    visits: Array
    levels: Array
    ids: Array
    seed: Array
    step: Array
    tasks: Array


@functools.partial(jax.jit, static_argnums=(4, 5))
def equally_many(key: Array, visits_N: Array, levels_N: Array, step: Array, tasks: int, count: int) -> Array:
    """i32[count]: equally many problems of each of `tasks` levels, those with the fewest visits, ties at random.

    If the tasks do not divide the batch, a different subset of tasks gets one more problem in each step. A task with too few
    problems repeats them.
    """
    order = jnp.lexsort((jax.random.uniform(key, visits_N.shape), visits_N, levels_N))
    size = jnp.zeros(tasks, jnp.int32).at[levels_N].add(1)
    first = jnp.cumsum(size) - size
    slot = jnp.arange(count)
    task = (slot + step * count) % tasks
    rank = slot // tasks  # the slot's number among the slots of its task
    return order[first[task] + rank % size[task]].astype(jnp.int32)


@controller
def task_balance() -> Controller:
    """`prompt_ids`: `equally_many` problems of each level of the task, each level in passes. Facts: `tried`."""
    def chosen(visits, levels, seed, step, tasks, count):
        return equally_many(passes.key_of(seed, step), visits, levels, step, tasks, count)

    def observe(state, facts):
        asked = jnp.zeros(state.visits.size, bool).at[state.ids].set(True)
        visits, step = state.visits + (asked | (facts["tried"] > 0)), state.step + 1
        ids = chosen(visits, state.levels, state.seed, step, state.tasks.size, state.ids.size)
        return state._replace(visits=visits, ids=ids, step=step)

    def init(levels, batch, seed):
        levels, none = jnp.asarray(levels, jnp.int32), jnp.zeros(len(levels), jnp.int32)
        tasks, step = jnp.arange(int(max(levels)) + 1), jnp.int32(0)
        return Shelves(none, levels, chosen(none, levels, seed, step, tasks.size, batch), jnp.asarray(seed), step, tasks)

    return Controller(init, lambda state: {"prompt_ids": state.ids}, observe, facts=("tried",), knobs=("prompt_ids",))

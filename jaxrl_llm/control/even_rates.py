"""Equally many problems of each pass rate of the first policy (QwenLong-L1.5, arXiv 2512.12967)."""
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class Binned(NamedTuple):
    """State: `weights` f32[N] and tasks i32[N] of the problems, and how often each is to be asked, `times` i32[N]."""

    weights: Array
    tasks: Array
    times: Array


def even(rate_N: Array, known_N: Array, tasks_N: Array, bins: int) -> Array:
    """f32[N]: weights with which all bins of equal width of `rate_N` that a task fills have an equal share of its draws.

    The mean weight of each task is 1. Problems that are not `known_N` bool[N] have the weight 0, unless none is known.
    """
    place = jnp.clip((rate_N * bins).astype(jnp.int32), 0, bins - 1)
    cell = tasks_N * bins + place
    cells = (int(tasks_N.size) + 1) * bins  # tasks have numbers below N
    size = jnp.zeros(cells).at[cell].add(known_N)
    filled = (size > 0).reshape(-1, bins).sum(1)
    number = jnp.zeros(cells // bins).at[tasks_N].add(1.0)
    weights = number[tasks_N] / jnp.maximum(filled[tasks_N] * size[cell], 1)
    return jnp.where(known_N.any(), jnp.where(known_N, weights, 0), 1.0).astype(jnp.float32)


@controller
def even_rates(*, times: int = 8, bins: int = 4) -> Controller:
    """`prompt_weights`, `measured_times`: every problem is asked `times` times before the first step, see `even`.

    The paper chooses equally many problems from uniform bins of their pass rate; here bins with few problems are drawn as often
    as others, and no problem is left out. Both numbers are ours. Facts: `measured_tried`, `measured_right`. Raises ValueError
    for fewer than one answer or bin.
    """
    if min(times, bins) < 1:
        raise ValueError(f"times={times}, bins={bins}; give the answers to each problem before the first step and the bins of "
                         "their pass rates, 1 or more of both")

    def observe(state, facts):
        tried = facts["measured_tried"]
        weights = even(facts["measured_right"] / jnp.maximum(tried, 1), tried > 0, state.tasks, bins)
        return state._replace(weights=weights, times=jnp.zeros_like(state.times))

    def init(shares):
        tasks = np.asarray(shares.tasks, np.int32)
        return Binned(jnp.ones(len(tasks)), jnp.asarray(tasks), jnp.full(len(tasks), times, jnp.int32))

    return Controller(init, lambda state: {"prompt_weights": state.weights, "measured_times": state.times}, observe,
                      facts=("measured_tried", "measured_right"), knobs=("prompt_weights", "measured_times"))

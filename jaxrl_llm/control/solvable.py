"""Training on the problems that the first policy solves now and then (ARPO, arXiv 2505.16282)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class Chosen(NamedTuple):
    """State: the `weights` f32[N] of the problems in the draw, and how often each is to be asked, `times` i32[N]."""

    weights: Array
    times: Array


@controller
def solvable(*, times: int = 16) -> Controller:
    """`prompt_weights`, `measured_times`: every problem is asked `times` times before the first step; solved ones remain.

    If none was solved, all remain. The number is the paper's. Facts: `measured_tried`, `measured_right`. Raises ValueError for
    fewer than one answer.
    """
    if times < 1:
        raise ValueError(f"times={times}; give the answers to each problem before the first step, 1 or more")

    def observe(state, facts):
        solved = facts["measured_right"] > 0
        return Chosen(jnp.where(solved.any(), solved, True).astype(jnp.float32), jnp.zeros_like(state.times))

    return Controller(lambda prompts: Chosen(jnp.ones(prompts), jnp.full(prompts, times, jnp.int32)),
                      lambda state: {"prompt_weights": state.weights, "measured_times": state.times}, observe,
                      facts=("measured_tried", "measured_right"), knobs=("prompt_weights", "measured_times"))

"""Shares of hard, medium and easy problems in the first phase of a run, and bands of difficulty in later ones.

TableGPT-R1 (arXiv 2512.20312) asks its first policy, and composes the first stage by how often it is right.
"""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import staged_problems as stages
from jaxrl_llm.control.base import Controller, controller


class Strata(NamedTuple):
    """The `weights` f32[N] of the first phase, answers that are still to be given, `times` i32[N], and later phases' `kept`."""

    weights: Array
    times: Array
    kept: stages.Kept


def stratum(rate_N: Array, low: float, high: float) -> Array:
    """i32[N]: 0 hard, a rate below `low`; 1 medium, to `high` inclusive; 2 easy."""
    return jnp.where(rate_N < low - 1e-6, 0, jnp.where(rate_N > high + 1e-6, 2, 1))


def stratified_weights(rate_N: Array, known_N: Array, shares: Sequence[float], low: float, high: float) -> Array:
    """f32[N], of mean 1: each stratum that has problems is drawn in proportion to its share, and its problems evenly.

    Problems that are not `known_N` bool[N] have the weight 0, unless no known one has a share.
    """
    which, drawn = stratum(rate_N, low, high), jnp.asarray(shares, jnp.float32)
    size = jnp.zeros(3).at[which].add(known_N)
    total = jnp.sum(jnp.where(size > 0, drawn, 0))
    weights = known_N * drawn[which] / jnp.maximum(size[which], 1) * rate_N.size / jnp.maximum(total, 1e-9)
    return jnp.where(total > 0, weights, 1.0).astype(jnp.float32)


@controller
def stratified(*, times: int = 5, shares: Sequence[float] = (0.2, 0.6, 0.2), low: float = 0.3, high: float = 0.7,
               bands: Sequence[Sequence[float]] = ((0, 1), (0.375, 0.875), (0, 0.49))) -> Controller:
    """`prompt_weights`, `measured_times`: every problem is asked `times` times before the first step.

    The first phase draws hard, medium and easy problems in these `shares`, see `stratified_weights`; later ones have those of
    `staged_problems` with these `bands`. The numbers are TableGPT-R1's, which takes the share of a stratum once, and all of a
    stratum that is short; here draws repeat its problems. Facts: `measured_tried`, `measured_right`, `tried`, `right`.
    Raises ValueError: no answer, not three shares of 0 or more with one above 0, bounds or bands that are not in order.
    """
    if times < 1 or len(shares) != 3 or min(shares) < 0 or not sum(shares) > 0 or not 0 <= low <= high <= 1:
        raise ValueError(f"times={times}, shares={tuple(shares)}, low={low}, high={high}; give one answer or more, the shares "
                         "of hard, medium and easy problems, and 0 <= low <= high <= 1")
    inner = stages.staged_problems(bands=bands)
    assert inner.begin is not None
    begin = inner.begin

    def observe(state, facts):
        if "measured_tried" not in facts:
            return state._replace(kept=inner.observe(state.kept, facts))
        tried = facts["measured_tried"]
        weights = stratified_weights(facts["measured_right"] / jnp.maximum(tried, 1), tried > 0, shares, low, high)
        return state._replace(weights=weights, times=jnp.zeros_like(state.times))

    def propose(state):
        later = inner.propose(state.kept)["prompt_weights"]
        return {"prompt_weights": jnp.where(state.kept.number == 0, state.weights, later), "measured_times": state.times}

    def init(prompts):
        return Strata(jnp.ones(prompts), jnp.full(prompts, times, jnp.int32), inner.init(prompts))

    return Controller(init, propose, observe, facts=("measured_tried", "measured_right", "tried", "right"),
                      knobs=("prompt_weights", "measured_times"), begin=lambda state: state._replace(kept=begin(state.kept)))

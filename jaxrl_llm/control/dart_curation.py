"""DART-GUI: fewer rollouts for tasks that mostly succeed (arXiv 2509.23866; the map from rate to number is reconstructed)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class Rates(NamedTuple):
    """State: the walk, decayed rollouts and right ones of N problems, f32[N], and `most` i32[], rollouts of a prompt."""

    walk: passes.Walk
    tried: Array
    right: Array
    most: Array


def rollouts_of(success: Array, most: Array | int, *, threshold: float = 0.6, least: int = 2) -> Array:
    """i32 of the shape of `success`: `max(least, round(most (1 - s) / (1 - threshold)))` above the threshold, else `most`."""
    fewer = jnp.round(most * (1 - success) / (1 - threshold) + 1e-6).astype(jnp.int32)
    return jnp.where(success > threshold, jnp.maximum(fewer, least), most).astype(jnp.int32)


def step_limit(longest_success: Array, *, default: Array | int = 30) -> Array:
    """i32: length of the longest success of a problem so far, `default` without a success (0)."""
    return jnp.where(longest_success > 0, longest_success, default)


@controller
def dart_curation(*, threshold: float = 0.6, least: int = 2, decay: float = 0.5) -> Controller:
    """`prompt_ids`, `group_sizes`: passes through all problems, with `rollouts_of` each problem's success rate.

    `most` is `sampling.max_group`. The rate is over all rollouts of a problem, weighted by `decay` for each later visit (ours);
    a problem that was never sampled gets `most`. Facts: `tried`, `right`. Raises ValueError: a threshold or a decay outside [0,
    1), fewer than one rollout.
    """
    if not (0 <= threshold < 1 and 0 <= decay < 1) or least < 1:
        raise ValueError(f"threshold={threshold}, decay={decay}, least={least}; give 0 or more and less than 1 for the first "
                         "two, and one rollout or more")

    def observe(state, facts):
        seen = facts["tried"] > 0
        tried, right = (jnp.where(seen, decay * old + facts[name], old)
                        for name, old in (("tried", state.tried), ("right", state.right)))
        walk = passes.advance(state.walk, facts["tried"], jnp.ones(seen.size, bool))
        return state._replace(walk=walk, tried=tried, right=right)

    def propose(state):
        rate = (state.right / jnp.where(state.tried > 0, state.tried, 1))[state.walk.ids]
        return {"prompt_ids": state.walk.ids, "group_sizes": rollouts_of(rate, state.most, threshold=threshold, least=least)}

    def init(shares, batch, seed, max_group):
        none = jnp.zeros(shares.problems)
        return Rates(passes.start(shares, batch, seed), none, none, jnp.int32(max_group))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_ids", "group_sizes"))

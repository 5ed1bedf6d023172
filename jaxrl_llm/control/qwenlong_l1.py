"""QwenLong-L1: short prompts first, longer ones in phases, with the hard ones of earlier phases (arXiv 2505.17667)."""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import registry
from jaxrl_llm.control.base import Controller, controller

MODES = ("zero_only", "weighted")


class Phases(NamedTuple):
    """For each of N problems, i32[N]: its phase from 1 (0: too long), rollouts when first sampled, right ones; `step` i32[]."""

    phase: Array
    tried: Array
    right: Array
    step: Array


def phase_of(lengths_N: Array, limits: Sequence[int]) -> Array:
    """i32[N]: k where `limits[k - 2] < length <= limits[k - 1]`, 0 for lengths above the last limit."""
    number = jnp.searchsorted(jnp.asarray(limits), lengths_N, side="left") + 1
    return jnp.where(number > len(limits), 0, number).astype(jnp.int32)


def difficulty(mean_N: Array, group: Array) -> Array:
    """f32[N]: `1 / mean reward`; if nothing was right, `group`, as for one success in a group (ours)."""
    return jnp.where(mean_N > 0, 1 / jnp.where(mean_N > 0, mean_N, 1), group)


@controller
def qwenlong_l1(*, limits: Sequence[int] = (20_000, 60_000), every: int = 100, mode: str = "zero_only") -> Controller:
    """`prompt_weights` f32[N]: in phase k 1 for its own problems; for earlier ones by their difficulty when first sampled.

    `zero_only`, as the paper ran it: 1 for earlier problems without a right rollout. `weighted`: their `difficulty` divided by
    the rollouts of a group, which is at most 1 (the share is ours). Problems that were never sampled count as not hard, and
    prompts longer than the last of the `limits`, in tokens, are excluded. A phase lasts `every` steps (ours), the last phase
    never ends. Facts: `tried`, `right`.

    Raises:
      ValueError: limits that do not grow, phases without a step, or another mode.
    """
    registry.one_of("mode", mode, MODES)
    if not limits or list(limits) != sorted(set(limits)) or every < 1:
        raise ValueError(f"limits={tuple(limits)}, every={every}; give limits that grow, and one step or more")

    def propose(state):
        now = 1 + jnp.minimum(state.step // every, len(limits) - 1)
        mean = state.right / jnp.maximum(state.tried, 1)
        if mode == "zero_only":
            hard = (mean == 0).astype(jnp.float32)
        else:
            hard = difficulty(mean, state.tried) / jnp.maximum(state.tried, 1)
        earlier = (state.phase > 0) & (state.phase < now) & (state.tried > 0)
        return {"prompt_weights": jnp.where(state.phase == now, 1.0, jnp.where(earlier, hard, 0.0))}

    def observe(state, facts):
        first = state.tried == 0
        return state._replace(tried=state.tried + jnp.where(first, facts["tried"], 0),
                              right=state.right + jnp.where(first, facts["right"], 0), step=state.step + 1)

    def init(prompt_lengths):
        none = jnp.zeros(len(prompt_lengths), jnp.int32)
        return Phases(phase_of(jnp.asarray(prompt_lengths), limits), none, none, jnp.int32(0))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_weights",))

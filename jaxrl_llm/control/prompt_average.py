"""A moving average of the reward of each prompt: the simplest prior for V0.5 and for rollout budgets."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked


class PromptAverage(NamedTuple):
    """For each of N prompts, f32[N]: average reward, and the weight of its evidence (0: never tried)."""

    average: Array
    weight: Array


def empty(num_prompts: int) -> PromptAverage:
    """The state before any rollout."""
    return PromptAverage(jnp.zeros(num_prompts), jnp.zeros(num_prompts))


def predict(state: PromptAverage, prompt_ids_P: Array, *, unknown: Array | float | None = None) -> Array:
    """f32[P]: the averages of these prompts.

    Prompts never tried, or with ids outside 0 .. N - 1, get `unknown`: by default the mean over tried prompts, or 0.5.
    """
    if unknown is None:
        tried = state.weight > 0
        unknown = jnp.where(jnp.any(tried), masked.mean(state.average, tried), 0.5)
    ids = jnp.where(prompt_ids_P < 0, state.average.size, prompt_ids_P)
    known = state.weight.at[ids].get(mode="fill", fill_value=0) > 0
    return jnp.where(known, state.average.at[ids].get(mode="fill", fill_value=0), unknown)


def observe(state: PromptAverage, rollouts: Rollouts, *, decay: float = 0.5) -> PromptAverage:
    """The state after one more group for each of these prompts.

    `weight' = decay * weight + n` and `average' = (decay * weight * average + sum of rewards) / weight'`, n the valid
    rollouts: with `decay` 1 the average is over all rewards, with 0 over the last group. A prompt that is in the batch
    twice is counted once with all its rollouts.
    """
    N = state.average.size
    ids = jnp.where(rollouts.prompt_ids < 0, N, rollouts.prompt_ids)
    def add(x):
        return jnp.zeros(N).at[ids].add(x.astype(jnp.float32), mode="drop")
    n = add(masked.count(rollouts.valid, axis=1))
    total = add(masked.sum(rollouts.rewards, rollouts.valid, axis=1))
    old = jnp.where(n > 0, decay, 1.0) * state.weight
    weight = old + n
    moved = (old * state.average + total) / jnp.where(weight > 0, weight, 1)
    return PromptAverage(jnp.where(n > 0, moved, state.average), weight)

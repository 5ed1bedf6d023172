"""QwenLong-L1: short prompts first, longer ones in phases, with the hard ones of earlier phases (arXiv 2505.17667)."""
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.tools import registry

MODES = ("zero_only", "weighted")


class Phases(NamedTuple):
    """For each of N problems, i32[N]: its phase from 1 (0: too long), rollouts when first sampled, right ones.

    `now` i32[]: the phase of the run.
    """

    phase: Array
    tried: Array
    right: Array
    now: Array


def limits_of(lengths_N: np.ndarray, limits: Sequence[float]) -> tuple[int, ...]:
    """Limits in tokens: those of at most 1 are shares of the prompts, the shortest ones first.

    Raises ValueError: a phase has no prompt of its own.
    """
    lengths = np.asarray(lengths_N)[np.asarray(lengths_N) > 0]
    tokens = [int(np.quantile(lengths, limit, method="inverted_cdf")) if limit <= 1 and lengths.size else int(limit)
              for limit in limits]
    for low, high in itertools.pairwise([0, *tokens]):
        if not ((lengths > low) & (lengths <= high)).any():
            raise ValueError(
                f"no prompt has more than {low} and at most {high} tokens, so a phase of qwenlong_l1 has no problem; prompts "
                f"have {min(lengths, default=0)} to {max(lengths, default=0)} tokens; set control=\"limits=(...)\" to limits "
                "between them, or to shares of the prompts such as (0.5, 1.0)")
    return tuple(tokens)


def phase_of(lengths_N: Array, limits: Sequence[int]) -> Array:
    """i32[N]: k where `limits[k - 2] < length <= limits[k - 1]`, 0 for lengths above the last limit."""
    number = jnp.searchsorted(jnp.asarray(limits), lengths_N, side="left") + 1
    return jnp.where(number > len(limits), 0, number).astype(jnp.int32)


def difficulty(mean_N: Array, group: Array) -> Array:
    """f32[N]: `1 / mean reward`; if nothing was right, `group`, as for one success in a group (ours)."""
    return jnp.where(mean_N > 0, 1 / jnp.where(mean_N > 0, mean_N, 1), group)


@controller
def qwenlong_l1(*, limits: Sequence[float] = (20_000, 60_000), mode: str = "zero_only") -> Controller:
    """`prompt_weights` f32[N]: in phase k of a run 1 for its own problems; for earlier ones by their first difficulty.

    `zero_only`, as the paper ran it: 1 for earlier problems without a right rollout. `weighted`: their `difficulty` divided by
    the rollouts of a group, which is at most 1 (the share is ours). Problems that were never sampled count as not hard, and
    prompts longer than the last of the `limits` are excluded. Limits are tokens; up to 1 they are shares of the prompts from
    the shortest on, so that (0.5, 1.0) are two phases of any task (ours). Further phases of the run are as the last of these.
    Facts: `tried`, `right`. Raises ValueError: limits that do not grow, phases without a problem, or another mode.
    """
    registry.one_of("mode", mode, MODES)
    if not limits or list(limits) != sorted(set(limits)):
        raise ValueError(f"limits={tuple(limits)}; give limits that grow")

    def propose(state):
        mean = state.right / jnp.maximum(state.tried, 1)
        if mode == "zero_only":
            hard = (mean == 0).astype(jnp.float32)
        else:
            hard = difficulty(mean, state.tried) / jnp.maximum(state.tried, 1)
        earlier = (state.phase > 0) & (state.phase < state.now) & (state.tried > 0)
        return {"prompt_weights": jnp.where(state.phase == state.now, 1.0, jnp.where(earlier, hard, 0.0))}

    def observe(state, facts):
        first = state.tried == 0
        return state._replace(tried=state.tried + jnp.where(first, facts["tried"], 0),
                              right=state.right + jnp.where(first, facts["right"], 0))

    def begin(state):
        return state._replace(now=jnp.minimum(state.now + 1, len(limits)))

    def init(prompt_lengths):
        none, tokens = jnp.zeros(len(prompt_lengths), jnp.int32), limits_of(prompt_lengths, limits)
        return Phases(phase_of(jnp.asarray(prompt_lengths), tokens), none, none, jnp.int32(1))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_weights",), begin=begin)

"""DART-GUI: rollouts of a problem are no longer than its longest success so far (arXiv 2509.23866)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.control.dart_curation import step_limit


class Successes(NamedTuple):
    """Tokens of the longest success of each of N problems, i32[N], 0: none, and `most` i32[], those of any rollout."""

    longest: Array
    most: Array


@controller
def dart_lengths() -> Controller:
    """`token_limits` i32[N]: the `step_limit` of each problem, `sampling.max_tokens` before its first success.

    The paper counts steps; here all tokens after the prompt count. No later success is longer than the first ones of a problem.
    Facts: `rollouts` with `prompt_ids` in 0 .. N - 1 (others are not counted).
    """
    def observe(state, facts):
        rollouts = facts["rollouts"]
        lengths = jnp.sum(rollouts.present, axis=-1, dtype=jnp.int32)
        lengths = jnp.max(jnp.where(rollouts.valid & rollouts.correct, lengths, 0), axis=1)
        ids = jnp.where(rollouts.prompt_ids < 0, state.longest.size, rollouts.prompt_ids)
        return state._replace(longest=state.longest.at[ids].max(lengths, mode="drop"))

    return Controller(lambda prompts, max_tokens: Successes(jnp.zeros(prompts, jnp.int32), jnp.int32(max_tokens)),
                      lambda state: {"token_limits": step_limit(state.longest, default=state.most)}, observe,
                      facts=("rollouts",), knobs=("token_limits",))

"""Aggregation of token losses: weights computed once per optimiser step, so that parts of a batch simply add up.

Every aggregation is linear in the token losses, hence `loss = sum(weights * token_loss)`. The weights hold the global
counts; computed for the whole mini-batch and sliced with it, they make the losses and gradients of micro-batches sum to
the whole batch's, whatever the padding and the split over devices.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.segments import step_totals
from jaxrl_llm.tools import registry

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "step_mean_token_mean", "prompt_mean",
                "fixed_length")


def check_aggregation(aggregation: str, max_len: int | None) -> None:
    """ValueError for an unknown aggregation, or `fixed_length` without a positive `max_len`."""
    registry.one_of("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "fixed_length" and (max_len is None or max_len < 1):
        raise ValueError(f"aggregation='fixed_length' needs max_len, the generation budget in tokens; got {max_len}")


def token_weights(rollouts: Rollouts, aggregation: str, max_len: int | None = None) -> Array:
    """f32[P, G, T]: the share of each token in the aggregated loss; 0 outside the mask.

    m = the trained tokens, live = rollouts with at least one:
      `token_mean`           1 / sum of m over the batch
      `seq_mean_token_mean`  1 / (number of live rollouts * length of the token's rollout)
      `seq_mean_token_sum`   1 / number of live rollouts
      `step_mean_token_mean` 1 / (number of steps * tokens of the token's step), by `step_ids`; without them a rollout is one
      `prompt_mean`          1 / (number of prompts with tokens * tokens of the token's prompt)
      `fixed_length`         1 / (number of live rollouts * max_len), max_len the generation budget in tokens
    """
    check_aggregation(aggregation, max_len)
    mask = rollouts.token_mask
    if aggregation == "token_mean":
        count = masked.count(mask)
    elif aggregation == "step_mean_token_mean" and rollouts.step_ids is not None:
        size, last = step_totals(mask.astype(float), rollouts.step_ids, mask)
        count = masked.count(last) * size
    elif aggregation == "prompt_mean":
        per_prompt = masked.count(mask, axis=(1, 2), keepdims=True)
        count = masked.count(per_prompt > 0) * per_prompt
    else:
        count = masked.count(rollouts.live)
        if aggregation in ("seq_mean_token_mean", "step_mean_token_mean"):
            count = count * masked.count(mask, axis=2, keepdims=True)
        elif aggregation == "fixed_length":
            count = count * max_len
    return jnp.where(mask, 1 / jnp.maximum(count, 1), 0)


def sequence_weights(rollouts: Rollouts) -> Array:
    """f32[P, G]: 1 / (number of live rollouts) on live rollouts, 0 elsewhere."""
    return jnp.where(rollouts.live, 1 / jnp.maximum(masked.count(rollouts.live), 1), 0)

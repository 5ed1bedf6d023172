"""Log-probs of the policy before its updates under what it read when it wrote: the denominator of Guide-GRPO's ratio.

`old_logprobs` are those under the prompt, whatever the policy read (arXiv 2506.13923).
"""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.recorders.base import Context, Recorder, recorder

NAME = "written_logprobs"


def written(logprobs: Callable) -> Recorder:
    """`written_logprobs` f32[P, G, T], of tokens with the role ELSEWHERE; NaN for others, which have old log-probs.

    `logprobs(params, lora, rollouts)` is the compiled `Policy.logprobs`. Rollouts have `read_tokens`, `read_mask` [P, G, R]; a
    batch without such tokens costs no pass.
    """
    def record(own, params, lora, rollouts):
        result = jnp.full(rollouts.mask.shape, jnp.nan, jnp.float32)
        if rollouts.role is not None and (elsewhere := _elsewhere(rollouts)).any():
            values, _ = logprobs(params, lora, _under_reads(rollouts))
            result = jnp.where(elsewhere, values.reshape(result.shape), result)
        if isinstance(rollouts.mask, jax.Array):  # one program updates on batches with and without such tokens
            result = jax.device_put(result, rollouts.mask.sharding)
        return {NAME: result}

    return Recorder("written", (NAME,), record)


@jax.jit
def _elsewhere(rollouts: Rollouts) -> jax.Array:
    """bool[P, G, T], trained tokens that the policy wrote under another text."""
    return rollouts.token_mask & (rollouts.role == Role.ELSEWHERE)


@jax.jit
def _under_reads(rollouts: Rollouts) -> Rollouts:
    """Each rollout as a prompt with a group of one, `[P G, 1, T]`, behind what its writer read.

    Rollouts of which nothing is asked have a prompt of one token.
    """
    P, G, T = rollouts.mask.shape
    mask = _elsewhere(rollouts).reshape(P * G, 1, T)
    read = rollouts.extras["read_mask"].reshape(P * G, -1)
    temperature = None if rollouts.temperature is None else jnp.repeat(rollouts.temperature, G)
    return Rollouts(mask=mask, valid=mask.any(-1), tokens=rollouts.tokens.reshape(P * G, 1, T),
                    role=rollouts.role.reshape(P * G, 1, T), prompt_tokens=rollouts.extras["read_tokens"].reshape(P * G, -1),
                    prompt_mask=read | (jnp.arange(read.shape[1]) == 0), temperature=temperature)


@recorder("written", needs=("read_tokens", "read_mask"), provides=(NAME,), passes=1)
def of_run(context: Context) -> Recorder:
    """In rectangular rows, in as many parts as other log-probs of a batch."""
    logprobs = context.jitted(type(context.policy).logprobs, context.policy, context.pieces)
    return written(context.guarded("written_logprobs", logprobs))

"""Log-probs of the policy before its updates."""
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.data.rollouts import known_logprobs
from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


def old(logprobs: Callable, as_sampled: bool = False) -> Recorder:
    """`old_logprobs`, `entropies` f32[P, G, T], by `logprobs(params, lora, rollouts)`, see `Layout.logprobs`.

    Those that the rollouts have already stay. With `as_sampled` the old log-probs of replayed rollouts are the log-probs at the
    time of sampling, where these are known.
    """
    def record(own, params, lora, rollouts):
        before, entropies = logprobs(params, lora, texts_of(rollouts))
        before = known_logprobs(rollouts.old_logprobs, before)
        if as_sampled:
            sampled = known_logprobs(rollouts.behavior_logprobs, before)
            before = jnp.where(rollouts.extras["replayed"][..., None], sampled, before)
        return {"old_logprobs": before, "entropies": entropies}

    return Recorder("old", ("old_logprobs", "entropies"), record)


@recorder("old", provides=("old_logprobs", "entropies"), passes=1)
def of_run(context: Context) -> Recorder:
    """In the layout of the run, as updates compute them."""
    return old(context.logprobs, context.as_sampled)

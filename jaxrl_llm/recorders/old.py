"""Log-probs of the policy before its updates."""
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.data.rollouts import sampled_logprobs
from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


def old(logprobs: Callable, as_sampled: bool = False) -> Recorder:
    """`old_logprobs`, `entropies` f32[P, G, T], by `logprobs(params, lora, rollouts)`, see `Layout.logprobs`.

    With `as_sampled` the old log-probs of replayed rollouts are the log-probs at the time of sampling.
    """
    def record(own, params, lora, rollouts):
        before, entropies = logprobs(params, lora, texts_of(rollouts))
        if as_sampled:
            before = jnp.where(rollouts.extras["replayed"][..., None], sampled_logprobs(rollouts, before), before)
        return {"old_logprobs": before, "entropies": entropies}

    return Recorder("old", ("old_logprobs", "entropies"), record)


@recorder("old", provides=("old_logprobs", "entropies"), passes=1)
def of_run(context: Context) -> Recorder:
    """In the layout of the run, as updates compute them."""
    return old(context.logprobs, context.as_sampled)

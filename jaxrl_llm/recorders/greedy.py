"""The policy's log-probs of tokens that it did not sample: the most likely ones, by itself and by the model at the start."""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of

NAMES = ("max_logprobs", "greedy_logprobs")


def greedy(likeliest: Callable, adapters: bool) -> Recorder:
    """`max_logprobs`, and `greedy_logprobs` of the tokens that frozen weights find most likely; f32[P, G, T].

    `likeliest(params, lora, rollouts, at)` is the compiled `Policy.likeliest`. The frozen weights are those at the start of
    the run; for a policy with `adapters`, the weights without them.
    """
    def record(own, params, lora, rollouts):
        texts, without = texts_of(rollouts), jax.tree.map(jnp.zeros_like, lora)
        tokens, _ = likeliest(params if adapters else own, without, texts, None)
        _, most = likeliest(params, lora, texts, None)
        _, theirs = likeliest(params, lora, texts, tokens)
        return {"max_logprobs": most, "greedy_logprobs": theirs}

    def copy(params):
        return jax.tree.map(jnp.copy, params)

    return Recorder("greedy", NAMES, record, init=None if adapters else copy)


@recorder("greedy", provides=NAMES, passes=3, copies=True)
def of_run(context: Context) -> Recorder:
    """Called for the likeliest tokens and for given ones."""
    likeliest = context.jitted(type(context.policy).likeliest, context.policy)
    return greedy(context.guarded("likeliest", likeliest, 2), bool(context.config.lora.rank))

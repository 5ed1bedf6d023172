"""The policy's log-probs of tokens that it did not sample: the most likely ones, by itself and by the model at the start."""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.recorders.base import FIELDS, Recorder, texts_of


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

    return Recorder("greedy", FIELDS["greedy"], record, init=None if adapters else copy)

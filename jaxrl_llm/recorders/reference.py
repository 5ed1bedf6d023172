"""Log-probs of the policy that the run began with."""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.recorders.base import Recorder, texts_of


def reference(score: Callable, adapters: bool) -> Recorder:
    """`ref_logprobs` f32[P, G, T] of frozen weights; a policy with `adapters` without them, as they alone are trained."""
    def record(own, params, lora, rollouts):
        return {"ref_logprobs": score(params if adapters else own, None, texts_of(rollouts))[0]}

    def copy(params):
        return jax.tree.map(jnp.copy, params)

    return Recorder("reference", ("ref_logprobs",), record, init=None if adapters else copy)

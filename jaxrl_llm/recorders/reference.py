"""Log-probs of the policy that the run began with."""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.recorders.base import Recorder, texts_of


def reference(score: Callable, adapters: bool) -> Recorder:
    """`ref_logprobs` f32[P, G, T] of frozen weights; of a policy with `adapters` those without them, which are frozen anyway."""
    def record(own, params, lora, rollouts):
        return {"ref_logprobs": score(params if adapters else own, None, texts_of(rollouts))[0]}

    return Recorder("reference", ("ref_logprobs",), record, init=None if adapters else lambda params: jax.tree.map(jnp.copy, params))

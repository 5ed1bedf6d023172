"""Log-probs of the policy that the run began with."""
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


def reference(logprobs: Callable, adapters: bool, names: tuple[str, ...] = ("ref_logprobs",)) -> Recorder:
    """`ref_logprobs` f32[P, G, T] of frozen weights, stored under all `names`, which may include `base_logprobs`.

    For a policy with `adapters` the frozen weights are those without the adapters, which alone are trained.
    """
    def record(own, params, lora, rollouts):
        without = jax.tree.map(jnp.zeros_like, lora)  # adapters of 0 add nothing, and no further program is compiled
        return dict.fromkeys(names, logprobs(params if adapters else own, without, texts_of(rollouts))[0])

    def copy(params):
        return jax.tree.map(jnp.copy, params)

    return Recorder("reference", names, record, init=None if adapters else copy)


@recorder("reference", provides=("ref_logprobs", "base_logprobs"), passes=1, copies=True)
def of_run(context: Context) -> Recorder:
    """One pass gives all fields that are asked for."""
    return reference(context.logprobs, bool(context.config.lora.rank), tuple(sorted(context.asked, reverse=True)))

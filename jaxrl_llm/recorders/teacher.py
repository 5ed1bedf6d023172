"""Log-probs of the policy's tokens under other models, which are frozen: teachers, and the base that they are compared with."""
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of

NAMES = ("teacher_logprobs", "teacher_id")


def teacher(functions: Sequence[Callable], weights: Sequence[Any], *, apart: bool = False) -> Recorder:
    """`teacher_logprobs` f32[P, G, T], of the only teacher, or of the one among several that teaches the prompt's task.

    With `apart` it is f32[P, G, T, E], the log-probs under all E teachers, with `teacher_id` i32[P], the index of that one.
    Every teacher reads all rollouts. `functions`: `logprobs(params, lora, rollouts)` of each, see `Layout.logprobs`; `weights`
    are the teachers' weights.
    """
    def record(own, params, lora, rollouts):
        texts = texts_of(rollouts)
        logprobs = jnp.stack([under(one, None, texts)[0] for under, one in zip(functions, own, strict=True)], axis=-1)
        which = rollouts.extras["task"] if len(own) > 1 else jnp.zeros(len(rollouts.valid), jnp.int32)
        if apart:
            return {"teacher_logprobs": logprobs, "teacher_id": which}
        return {"teacher_logprobs": jnp.take_along_axis(logprobs, which[:, None, None, None], axis=3)[..., 0]}

    return Recorder("teacher", NAMES if apart else NAMES[:1], record, given=tuple(weights))


@recorder("teacher", provides=NAMES, needs=("config.teacher.path", "task"))
def of_run(context: Context) -> Recorder:
    """The models at `config.teacher.path`, apart if the method reads which one teaches."""
    functions, weights = zip(*context.loaded("path"))
    return teacher(functions, weights, apart="teacher_id" in context.asked)


def base_model(logprobs: Callable, weights: Any) -> Recorder:
    """`base_logprobs` f32[P, G, T] of a model other than the initial policy."""
    return Recorder("base", ("base_logprobs",), lambda own, params, lora, rollouts: {
        "base_logprobs": logprobs(own, None, texts_of(rollouts))[0]}, given=weights)


@recorder("base", provides=("base_logprobs",), needs=("config.teacher.base",))
def base_of_run(context: Context) -> Recorder:
    """The model at `config.teacher.base`."""
    (logprobs, weights), = context.loaded("base")
    return base_model(logprobs, weights)

"""The interface of a recorder.

To add one, write a function that returns a `Recorder` into its own file:

    def surprise(policy: Policy) -> Recorder:
        logprobs = jax.jit(policy.logprobs)

        def record(own, params, lora, rollouts):
            return {"surprise": -logprobs(params, lora, rollouts)[0]}

        return Recorder("surprise", ("surprise",), record)

A `Learner` takes it as it is: `dataclasses.replace(learner, recorders=(*learner.recorders, surprise(learner.policy)))`. Its
estimator and its objective may then need `surprise`.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from jaxrl_llm.rollouts import Rollouts

FIELDS = {  # the arrays of recorders that any run makes if its method needs one of them, by recorder
    "old": ("old_logprobs", "entropies"),
    "features": ("old_logprobs", "entropies", "features"),
    "gradients": ("score_sq_norms",),
    "reference": ("ref_logprobs", "base_logprobs"),
    "greedy": ("max_logprobs", "greedy_logprobs"),
}


class Recorder(NamedTuple):
    """`record(own, params, lora, rollouts) -> arrays by name`, each a field of `Rollouts` or an entry of its `extras`.

    `params`, `lora` are the policy's, `own` is the pytree that the recorder keeps beside it, made by `init(params)`; None:
    nothing.
    `provides` names the arrays. `fit(own, policy, rollouts) -> (own, metrics)`, with `policy = (params, lora)`, trains `own` on
    each mini-batch, before the policy's update; None: it is frozen. `given` is `own` if it is neither made from the policy nor
    trained: weights of another model, which a run does not save.
    """

    name: str
    provides: tuple[str, ...]
    record: Callable[[Any, Any, Any, Rollouts], dict[str, Array]]
    init: Callable[[Any], Any] | None = None
    fit: Callable[[Any, tuple[Any, Any], Rollouts], tuple[Any, dict[str, Array]]] | None = None
    given: Any = None


def texts_of(batch: Rollouts) -> Rollouts:
    """The fields that log-probs are computed from, so that one program serves batches with any further fields."""
    return Rollouts(mask=batch.mask, valid=batch.valid, tokens=batch.tokens, prompt_tokens=batch.prompt_tokens,
                    prompt_mask=batch.prompt_mask, temperature=batch.temperature, filled=batch.filled, role=batch.role)


def recorded(rollouts: Rollouts, arrays: dict[str, Array]) -> Rollouts:
    """The rollouts with these arrays, in their fields or in `extras`."""
    fields = {name: value for name, value in arrays.items() if name in Rollouts.__dataclass_fields__}
    others = {name: value for name, value in arrays.items() if name not in fields}
    return rollouts.replace(**fields, extras={**rollouts.extras, **others})

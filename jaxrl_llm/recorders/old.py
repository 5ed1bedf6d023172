"""Log-probs of the policy before its updates."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Recorder, texts_of


def old(score: Callable) -> Recorder:
    """`old_logprobs`, `entropies` f32[P, G, T], by `score(params, lora, rollouts)`, see `training.policy.Policy.logprobs`."""
    def record(own, params, lora, rollouts):
        return dict(zip(("old_logprobs", "entropies"), score(params, lora, texts_of(rollouts))))

    return Recorder("old", ("old_logprobs", "entropies"), record)

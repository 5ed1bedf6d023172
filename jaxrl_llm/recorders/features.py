"""Features of the policy's own states for value models, with its log-probs from the same pass (POISE)."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import FIELDS, Recorder


def features(capture: Callable) -> Recorder:
    """`features` f32[P, G, 2D + 3] with `old_logprobs`, `entropies`, by `Policy.logprobs_and_features`."""
    names = FIELDS["features"]
    return Recorder("features", names, lambda own, params, lora, rollouts: dict(zip(names, capture(params, lora, rollouts))))

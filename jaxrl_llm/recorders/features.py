"""Features of the policy's own states for value models, with its log-probs from the same pass (POISE)."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Context, Recorder, recorder

NAMES = ("old_logprobs", "entropies", "features")


def features(capture: Callable) -> Recorder:
    """`features` f32[P, G, 2D + 3] with `old_logprobs`, `entropies`, by `Policy.logprobs_and_features`."""
    return Recorder("features", NAMES, lambda own, params, lora, rollouts: dict(zip(NAMES, capture(params, lora, rollouts))))


@recorder("features", provides=NAMES, passes=1)
def of_run(context: Context) -> Recorder:
    """Its pass is made in as many parts as updates have where they are split, so that it needs no more memory."""
    read = context.jitted(type(context.policy).logprobs_and_features, context.policy, context.pieces, capture=context.capture)
    return features(context.guarded("features", read))

"""Features of the policy's own states for value models, with its log-probs from the same pass (POISE)."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Context, Recorder, recorder

NAMES = ("old_logprobs", "entropies", "features")


def features(capture: Callable) -> Recorder:
    """`features` f32[P, G, 2D + 3] with `old_logprobs`, `entropies`, by `Layout.features`."""
    return Recorder("features", NAMES, lambda own, params, lora, rollouts: dict(zip(NAMES, capture(params, lora, rollouts))))


@recorder("features", provides=NAMES, passes=1)
def of_run(context: Context) -> Recorder:
    """In the layout of the run, as updates compute them."""
    return features(context.features)

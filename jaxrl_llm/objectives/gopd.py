"""The loss of generalised on-policy distillation: clipped surrogate, corrected for the sampler (arXiv 2602.12125)."""

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate, detached_weight
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped


@objective
def gopd(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    sampler_cap: float = 5.0,
    aggregation: str = "token_mean",
    max_len: int | None = None,
) -> Objective:
    """`l_t = min(exp(old - behaviour log-prob), sampler_cap) * clipped surrogate of A_t`, at most `-A c` where A < 0.

    The weight is a constant. A is a log-ratio of its own for each token (`advantages.gopd`). Metrics: `clip_fraction`,
    `clip_fraction_lower`, `sampler_weight`.
    """
    if dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be larger than 1")

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = token_ratio(logprobs, rollouts.old_logprobs, mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        loss, bounded = dual_clipped(loss, advantages, dual_clip)
        correction = token_ratio(rollouts.old_logprobs, rollouts.behavior_logprobs, mask)
        weight = detached_weight(correction, 0.0, sampler_cap)
        return weight * loss, {"clip_fraction": clipped, "clip_fraction_lower": bounded, "sampler_weight": weight}

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=("old_logprobs", "behavior_logprobs")
    )

"""CISPO: REINFORCE with a clipped, detached importance weight; no token loses its gradient (arXiv 2506.13585)."""
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import ANCHORS, anchor_logprobs
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import detached_weight, inside, still_moving
from jaxrl_llm.tools import registry


@objective
def cispo(*, min_ratio: float = 0.0, max_ratio: float = 5.0, clip_low: float | None = None, clip_high: float | None = None,
          anchor: str = "old", aggregation: str = "prompt_mean", max_len: int | None = None) -> Objective:
    """`l_t = -w_t A_t log p_t`, `w_t = stop_gradient(clip(rho_t, min_ratio, max_ratio))`; its value is not informative.

    The bounds are absolute ratios. `anchor="behavior"` computes rho against the sampler's log-probs: with `max_ratio`
    alone that is AIPO (arXiv 2505.24034) and the loss of ScaleRL (arXiv 2510.13786). `clip_low` and `clip_high`,
    given together, add the general form's mask: no gradient where PPO's clip would have none. The default bound is
    ScaleRL's; MiniMax did not publish one.
    """
    registry.one_of("anchor", anchor, ANCHORS)
    if (clip_low is None) != (clip_high is None):
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high}: give both (the mask) or neither")

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, anchor_logprobs(rollouts, anchor), rollouts.token_mask)
        weight = detached_weight(ratio, min_ratio, max_ratio)
        metrics = {"clip_fraction": ~inside(ratio, min_ratio, max_ratio), "max/ratio": ratio}
        if clip_low is not None:
            moving = still_moving(ratio, advantages, clip_low, clip_high)
            weight, metrics["masked_fraction"] = weight * moving, ~moving
        return -weight * advantages * logprobs, metrics

    needs = ("behavior_logprobs",) if anchor == "behavior" else ()
    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=needs, reads_old=anchor == "old",
                           unknown="old")

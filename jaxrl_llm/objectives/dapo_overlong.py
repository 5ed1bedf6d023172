"""Overlong filtering: answers that were cut off at the budget are not trained on (DAPO, arXiv 2503.14476)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip
from jaxrl_llm.objectives.restrict import restrict


@objective
def dapo_overlong(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0,
                  aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`ppo_clip` without the rollouts that `extras["truncated"]` bool[P, G] marks.

    They leave the loss and its denominator but stay in the mean and deviation of their group; the paper leaves that
    open. This is an alternative to the soft punishment in the reward (`advantages.dapo`); do not combine the two. The
    clip range is the paper's, `dual_clip` that of the DAPO recipe in verl.
    """
    clipped = ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, aggregation=aggregation, max_len=max_len)
    return restrict(clipped, lambda rollouts: ~rollouts.extras["truncated"], needs=("truncated",))

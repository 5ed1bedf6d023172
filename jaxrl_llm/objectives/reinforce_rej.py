"""Reinforce-Rej: plain policy gradient or clipped surrogate, without rejected prompts (arXiv 2504.11343)."""
from jaxrl_llm.control.dynamic_sampling import informative
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip
from jaxrl_llm.objectives.reinforce import reinforce
from jaxrl_llm.objectives.restrict import restrict
from jaxrl_llm.tools import registry


@objective
def reinforce_rej(*, variant: str = "reinforce", drop: bool = False, aggregation: str = "token_mean",
                  max_len: int | None = None) -> Objective:
    """`l_t = -A log p`, or with `variant="clip"` PPO's surrogate (0.2, dual clip 3).

    With `drop` the prompts whose rewards are all equal leave the denominator (and the terms) too, so that the size of a step
    does not depend on the number of rejected prompts; the released code only sets their advantage to 0. The clip is the
    released code's, whose script runs `variant="clip"` with a term `kl(0.001)`.
    """
    registry.one_of("variant", variant, ("reinforce", "clip"))

    if variant == "clip":
        result = ppo_clip(dual_clip=3.0, aggregation=aggregation, max_len=max_len)
    else:
        result = reinforce(aggregation=aggregation, max_len=max_len)

    def disagree(rollouts):
        return informative(rollouts.rewards, rollouts.valid)[:, None]

    return restrict(result, disagree, needs=("rewards",)) if drop else result

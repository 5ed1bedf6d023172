"""Reinforce-Rej: plain policy gradient or clipped surrogate, with a KL term and rejected prompts (arXiv 2504.11343)."""
from jaxrl_llm.control.dynamic_sampling import informative
from jaxrl_llm.objectives import kl
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip
from jaxrl_llm.objectives.restrict import restrict
from jaxrl_llm.tools import registry


@objective
def reinforce_rej(*, variant: str = "reinforce", kl_coef: float = 0.001, drop: bool = False, aggregation: str = "token_mean",
                  max_len: int | None = None) -> Objective:
    """`l_t = -A log p + kl_coef * KL_t` with KL = k3, or with `variant="clip"` PPO's surrogate (0.2, dual clip 3).

    With `drop` the prompts whose rewards are all equal leave the denominator (and the KL) too, so that the size of a
    step does not depend on the number of rejected prompts; the released code only sets their advantage to 0. Metric: `kl`.
    `kl_coef` and the clip are the released code's, whose script runs `variant="clip"`.
    """
    registry.one_of("variant", variant, ("reinforce", "clip"))

    def token_loss(logprobs, rollouts, advantages):
        divergence = kl.token_kl(logprobs, rollouts.ref_logprobs, "k3")
        return -advantages * logprobs + kl_coef * divergence, {"kl": divergence}

    if variant == "clip":
        result = ppo_clip(dual_clip=3.0, kl_coef=kl_coef, aggregation=aggregation, max_len=max_len)
    else:
        result = token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("ref_logprobs",))

    def disagree(rollouts):
        return informative(rollouts.rewards, rollouts.valid)[:, None]

    return restrict(result, disagree, needs=("rewards",)) if drop else result

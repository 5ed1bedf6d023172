"""Kimi k1.5's baseline: the group mean, or the log of the mean exponentiated reward (arXiv 2501.12599)."""

from jaxrl_llm import masked, registry
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.soft_value import soft_value


@estimator
def kimi_opmd(*, baseline: str = "mean", tau: float = 1.0) -> Estimator:
    """`A_i = r_i - b`; b is the group mean or, with `baseline="logavgexp"`, `tau * log mean_j exp(r_j / tau)`.

    The second is the normaliser of the policy that maximises `E[r] - tau * KL`: the mean for large `tau`, the maximum
    for small `tau`. A group of one has b = 0. The report does not give `tau`: Trinity-RFT has 1, ROLL 0.1.
    """
    registry.one_of("baseline", baseline, ("mean", "logavgexp"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        soft = baseline == "logavgexp"
        b = soft_value(rewards, valid, temperature=tau) if soft else masked.group_mean(rewards, valid)
        return rewards - masked.unless_alone(b, valid)

    return stateless(advantages)

"""MaxRL: the gradient of the log-likelihood of success, from the successes of a group (arXiv 2602.02710)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked

_ROUNDED = 1e-6  # of the mean size of rewards: a mean below it is what rounding leaves of rewards that cancel


@estimator
def maxrl(*, eps: float = 0.0) -> Estimator:
    """`A_i = (r_i - mean) / (mean + eps)` over the prompt's n valid rollouts; all are 0 where `mean <= 0`.

    Rewards are 0 or 1, and p is the probability of 1. The gradient of a group is then the mean score of its successes minus
    the mean score of all rollouts. Its expected value is `sum_{k=1}^{n-1} grad(pass@k) / k`, the gradient of `log p` cut off
    after n - 1 terms of its series in 1 - p: a pair of rollouts maximises p, as RLOO does, and a large group the likelihood.
    The update of prompts that are solved once in n times weighs n times as much as that of a centred reward.

    A prompt without a success gets 0, as the paper's practical estimator has it, and so does a group of one. With other
    rewards a mean below 0 counts as no success, as in prime-rl, and so does a mean that is 0 but for rounding. Costs that bring
    a mean near 0 make advantages large without bound: reward success alone. The equation is the paper's; eps is 1e-6 in the
    authors' code and in SkyRL, where it serves to divide 0 by it.
    """

    def advantages(rollouts):
        mean = masked.group_mean(rollouts.rewards, rollouts.valid)
        solved = mean > _ROUNDED * masked.group_mean(jnp.abs(rollouts.rewards), rollouts.valid)
        return jnp.where(solved, (rollouts.rewards - mean) / jnp.where(solved, mean + eps, 1), 0)

    return stateless(advantages)

"""RLOO: each rollout is compared with the mean of the others, an unbiased baseline (arXiv 2402.14740)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def rloo(*, singleton: str = "zero") -> Estimator:
    """`A_i = r_i - (S - r_i) / (n - 1)`, S the reward sum of the prompt's n valid rollouts.

    A group of one gets 0, or with `singleton="raw"` its reward.
    """
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def advantages(rollouts):
        baseline = masked.leave_one_out_mean(rollouts.rewards, rollouts.valid)
        if singleton == "raw":
            baseline = masked.unless_alone(baseline, rollouts.valid)
        return rollouts.rewards - baseline

    return stateless(advantages)

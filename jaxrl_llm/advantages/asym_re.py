"""Asymmetric REINFORCE: off-policy without ratios, on a baseline a little below the mean (arXiv 2506.20520)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


@estimator
def asym_re(*, baseline_shift: float = -0.1) -> Estimator:
    """`A_i = r_i - (group mean + baseline_shift)`, for the plain loss `-A log p` of the objective `reinforce`.

    The objective equals a centred reward plus `-baseline_shift` times the log-likelihood of every sample; the second term keeps
    the support of the behaviour policy. An all-equal group therefore gets `-baseline_shift`, not 0. With a shift of 0 or above
    training eventually collapses on stale data. A group of one gets its reward. -0.1 is the paper's shift for language models.
    """

    def advantages(rollouts):
        baseline = masked.group_mean(rollouts.rewards, rollouts.valid) + baseline_shift
        return rollouts.rewards - masked.unless_alone(baseline, rollouts.valid)

    return stateless(advantages)

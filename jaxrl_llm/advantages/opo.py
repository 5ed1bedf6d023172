"""OPO: the baseline is the mean reward weighted by length, which has the smallest variance (arXiv 2505.23585)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def opo(*, singleton: str = "zero") -> Estimator:
    """`A_i = r_i - b`, `b = sum_j l_j r_j / sum_j l_j` over the valid rollouts of each prompt, l their trained tokens.

    The variance of the gradient is smallest for the mean of r weighted by the squared norm of the gradient of log p(y_i); the
    paper takes that norm to be proportional to the length, which holds for the sum of the log-probs of all tokens. An all-equal
    group gets exactly 0. A group of one gets 0, or with `singleton="raw"` its reward, as in verl.
    """
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        mean, lengths = masked.group_mean(rewards, valid), rollouts.lengths.astype(rewards.dtype)
        total = masked.sum(lengths, valid, axis=1, keepdims=True)
        baseline = mean + masked.sum(lengths * (rewards - mean), valid, axis=1, keepdims=True) / jnp.maximum(total, 1)
        return rewards - (masked.unless_alone(baseline, valid) if singleton == "raw" else baseline)

    return stateless(advantages)

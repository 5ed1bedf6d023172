"""GPG: group-centred rewards, scaled up for the groups of the batch that have no gradient (arXiv 2504.02546)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def gpg(*, rescale: str = "signal") -> Estimator:
    """`A_i = alpha (r_i - group mean)`, `alpha = B / (B - M)`, for B valid rollouts, M of them in groups of equal rewards.

    A loss that is a mean over the batch counts the M rollouts, whose gradient is 0, and alpha makes up for them. The paper's
    F_norm is 1. `rescale`: `signal` is alpha of the paper and of its code; `rewarded` is B over the number of rollouts whose
    reward is not 0, as in verl's `adv_estimator=gpg`, which differs for every batch with wrong answers; `none` is alpha = 1.
    An all-equal group and a group of one get exactly 0.
    """
    registry.one_of("rescale", rescale, ("signal", "rewarded", "none"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        centred = rewards - masked.group_mean(rewards, valid)
        if rescale == "none":
            return centred
        compared = valid & jnp.any(valid & (centred != 0), axis=1, keepdims=True)
        counted = compared if rescale == "signal" else valid & (rewards != 0)
        return centred * (masked.count(valid) / jnp.maximum(masked.count(counted), 1)).astype(rewards.dtype)

    return stateless(advantages)

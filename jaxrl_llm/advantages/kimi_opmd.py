"""Kimi k1.5's baseline: the group mean, or the log of the mean exponentiated reward (arXiv 2501.12599)."""

import jax
import jax.numpy as jnp

from jaxrl_llm import masked, registry
from jaxrl_llm.advantages.base import Estimator, estimator, stateless


@estimator
def kimi_opmd(*, baseline: str = "mean", tau: float = 1.0) -> Estimator:
    """`A_i = r_i - b`; b is the group mean or, with `baseline="logavgexp"`, `tau * log mean_j exp(r_j / tau)`.

    The second is the normaliser of the policy that maximises `E[r] - tau * KL`: the mean for large `tau`, the maximum
    for small. A group of one has b = 0.
    """
    registry.one_of("baseline", baseline, ("mean", "logavgexp"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        n = masked.group_count(valid).astype(rewards.dtype)
        if baseline == "mean":
            b = masked.group_mean(rewards, valid)
        else:
            total = jax.nn.logsumexp(jnp.where(valid, rewards / tau, -jnp.inf), axis=1, keepdims=True)
            b = tau * (total - jnp.log(jnp.maximum(n, 1)))
        return rewards - jnp.where(n > 1, b, 0)

    return stateless(advantages)

"""Reinforce-Ada: kept rollouts compared with the success rate of all that were drawn (arXiv 2510.04996)."""

import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless


@estimator
def reinforce_ada(*, threshold: float = 0.7, norm_std: bool = False) -> Estimator:
    """`A = 1{r > threshold} - right / seen`, over the draws of the prompt before any were left out.

    `extras["right"]`, `extras["seen"]` i32[P] are these counts (see `jaxrl_llm.control.reinforce_ada.select`). The kept
    group is richer in the rare outcome than the policy, so its advantages do not sum to 0. A lone draw is compared with 0.
    `norm_std` divides by the sample deviation of the outcomes of all draws, at least 1e-6, plus 1e-6: one right
    rollout among 512 then weighs 22 times as much as its reward, which is why it is off. Where all draws agree A is 0.
    """

    def advantages(rollouts):
        outcome = (rollouts.rewards > threshold).astype(rollouts.rewards.dtype)
        right, seen = (rollouts.extras[name].astype(outcome.dtype)[:, None] for name in ("right", "seen"))
        share = right / jnp.maximum(seen, 1)
        values = outcome - jnp.where(seen > 1, share, 0)
        if norm_std:
            deviation = jnp.sqrt(share * (1 - share) * seen / jnp.maximum(seen - 1, 1))
            values = values / jnp.where(seen > 1, jnp.maximum(deviation, 1e-6) + 1e-6, 1)
        return values

    return stateless(advantages, needs=("rewards", "right", "seen"))

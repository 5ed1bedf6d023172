"""Pass@n of a whole group: only its best completion has an advantage, what it adds to the others (arXiv 2503.19595)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


@estimator
def best_of_group(*, norm_std: bool = True, eps: float = 1e-6) -> Estimator:
    """`A_i = (max_j r_j - max_{j != i} r_j) / (std + eps)` over the n valid rollouts of each prompt, std with divisor n - 1.

    The best reward of a group is compared with the best one without the rollout, so that all others get 0, and the best too if
    a second one is as good. Without `norm_std` nothing is divided, and the sum over a group of `A_i grad log p(y_i)` is an
    unbiased estimate of the gradient of the expected best reward, pass@n for rewards of 0 and 1. A group of one gets 0.
    The numbers are those of verl's `grpo_passk`, which names the paper.
    """

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        others = valid[:, None] & ~jnp.eye(valid.shape[1], dtype=bool)[None]
        best = masked.max(jnp.broadcast_to(rewards[:, None], others.shape), others, axis=2, initial=-jnp.inf)
        gain = jnp.where(jnp.isfinite(best), jnp.maximum(rewards - best, 0), 0)
        if not norm_std:
            return gain
        return gain / jnp.where(gain > 0, masked.group_std(rewards, valid, ddof=1) + eps, 1)

    return stateless(advantages)

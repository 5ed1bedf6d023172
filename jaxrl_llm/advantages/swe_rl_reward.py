"""SWE-RL: group z-score of the similarity to the true patch (arXiv 2502.18449); see `jaxrl_llm.rewards.swe_rl`."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.tools import registry


@estimator
def swe_rl_reward(*, variant: str = "continuous", eps: float = 1e-6) -> Estimator:
    """`A_i = (r_i - mean) / (std + eps)` of rewards -1 (bad format) or similarities in [0, 1]; sample deviation.

    `variant="discrete"`, the paper's ablation, counts similarities below 1 as 0. Rollouts whose scoring failed or timed
    out should have `valid` False rather than reward 0. eps as in `grpo`.
    """
    registry.one_of("variant", variant, ("continuous", "discrete"))

    def advantages(rollouts):
        rewards = rollouts.rewards
        if variant == "discrete":
            rewards = jnp.where((rewards >= 0) & (rewards < 1), 0, rewards)
        return group_z_score(rewards, rollouts.valid, eps=eps)

    return stateless(advantages)

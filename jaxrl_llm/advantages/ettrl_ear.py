"""ETTRL's advantage reshaping: rollouts with less entropy than their group count more (arXiv 2508.11356)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.advantages.ttrl import majority_reward
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def confidence(entropies_PGT: Array, mask_PGT: Array) -> Array:
    """`2 - h / mean h`, [P, G], h the mean token entropy of a rollout, its mean over the group's rollouts with tokens.

    1 on average over the group, and 1 for all where mean h is 0.
    """
    live = jnp.any(mask_PGT, axis=2)
    own = masked.mean(entropies_PGT, mask_PGT, axis=2)
    group = masked.group_mean(own, live)
    positive = group > 1e-12
    return jnp.where(positive, 2 - own / jnp.where(positive, group, 1), 1)


@estimator
def ettrl_ear(*, reward: str = "majority", variant: str = "reshape", factor_min: float | None = None, clip: float = 2.0,
              eps: float = 1e-6) -> Estimator:
    """`A' = (2 - h / mean h) A`: A the group z-score, h the mean token entropy of a rollout.

    `reward="majority"` computes A from TTRL's pseudo-rewards (`extras["answers"]`), `"given"` from the recorded rewards.
    The factor is negative, and flips the sign of A, for rollouts with more than twice the group's entropy unless
    `factor_min=0`. `variant="clip"` is the paper's alternative `A' = clip(A, -clip, clip)`, with its value 2; eps as in `grpo`.
    """
    registry.one_of("reward", reward, ("majority", "given"))
    registry.one_of("variant", variant, ("reshape", "clip"))

    def advantages(rollouts):
        valid = rollouts.valid
        rewards = rollouts.rewards if reward == "given" else majority_reward(rollouts.extras["answers"], valid)
        scores = group_z_score(rewards, valid, eps=eps)
        if variant == "clip":
            return jnp.clip(scores, -clip, clip)
        factor = confidence(rollouts.entropies, rollouts.token_mask)
        return scores * (factor if factor_min is None else jnp.maximum(factor, factor_min))

    needs = ("rewards",) if reward == "given" else ("answers",)
    return stateless(advantages, needs=needs if variant == "clip" else (*needs, "entropies"))

"""GRPO: z-score of the reward inside the group of rollouts of one prompt (arXiv 2402.03300)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def group_z_score(rewards_PG: Array, valid_PG: Array, *, eps: float, ddof: int = 1) -> Array:
    """`(r - mean) / (std + eps)` over the valid rollouts of each prompt, `[P, G] -> [P, G]`; 0 for equal rewards."""
    centred = rewards_PG - masked.group_mean(rewards_PG, valid_PG)
    return centred / (masked.group_std(rewards_PG, valid_PG, ddof=ddof) + eps)


@estimator
def grpo(*, eps: float = 1e-6, ddof: int = 1, singleton: str = "zero") -> Estimator:
    """`A_i = (r_i - mean) / (std + eps)` over the valid rollouts of each prompt.

    `ddof=1` is the sample standard deviation. An all-equal group gets exactly 0. A group of one gets 0, or with
    `singleton="raw"` its reward `r / (1 + eps)`. eps and ddof are verl's and tunix's numbers (TRL has eps 1e-4, OpenRLHF
    1e-9); the paper does not say which deviation it means.
    """
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def advantages(rollouts):
        scores = group_z_score(rollouts.rewards, rollouts.valid, eps=eps, ddof=ddof)
        if singleton == "raw":
            alone = masked.group_count(rollouts.valid) == 1
            scores = jnp.where(alone, rollouts.rewards / (1 + eps), scores)
        return scores

    return stateless(advantages)

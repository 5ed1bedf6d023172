"""SPEAR on fresh and replayed rollouts: the group or the recent past as baseline (arXiv 2509.22601)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


@estimator
def spear_clip() -> Estimator:
    """`A = r - mean` over the fresh rollouts of the prompt; for replayed ones `A = r - reward_baseline`.

    `extras["replayed"]` bool[P, G] marks the replayed ones; `extras["reward_baseline"]` f32[P] is the median of recent
    group means (`jaxrl_llm.control.recent_median`).
    """

    def advantages(rollouts):
        replayed = rollouts.extras["replayed"]
        centre = masked.group_mean(rollouts.rewards, rollouts.valid & ~replayed)
        return rollouts.rewards - jnp.where(replayed, rollouts.extras["reward_baseline"][:, None], centre)

    return stateless(advantages, needs=("rewards", "replayed", "reward_baseline"))

"""DOTS-RR: replayed rollouts under a trust region around the policy before the update (arXiv 2506.05316)."""
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio


@objective
def dots_rr(*, clip: float = 0.2) -> Objective:
    """`max(-A r, -A clip(r, c (1 - clip), c (1 + clip)))`, `r = exp(new - behaviour)`, `c = exp(old - behaviour)`, token mean.

    Behaviour is the policy that sampled the rollout, old the one before this update, so that c = 1 (PPO) on fresh rollouts.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = token_ratio(logprobs, rollouts.behavior_logprobs, mask)
        centre = token_ratio(rollouts.old_logprobs, rollouts.behavior_logprobs, mask)
        free, bound = -advantages * ratio, -advantages * jnp.clip(ratio, centre * (1 - clip), centre * (1 + clip))
        return jnp.maximum(free, bound), {"clip_fraction": bound > free, "max/ratio": ratio, "max/old_ratio": centre}

    return token_objective(token_loss, needs=("behavior_logprobs", "old_logprobs"), unknown="old", reads_old=True)

"""PPO on what the policy wrote under its prompt, and supervised learning on what it wrote elsewhere (arXiv 2510.15979)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def ppo_and_moved(*, moved_coef: float = 0.1, clip_low: float = 0.2, clip_high: float = 0.28) -> Objective:
    """`L_policy + moved_coef * L_moved`, each the mean over its own tokens, 0 if it has none.

    L_policy is the clipped surrogate; L_moved is `-log p` of tokens with the role ELSEWHERE, under the prompt and not under
    what the policy read when it wrote them; their advantages are not used. Metrics: `clip_fraction`, `moved_fraction`, share
    of the tokens that are moved, `max/ratio`. Cog-Rethinker's loss is DAPO's with such a term; its coefficient is not
    published.
    """
    def shares(rollouts):
        moved = moved_tokens(rollouts)
        sides = {"policy": rollouts.token_mask & ~moved, "moved": moved}
        return {name: token_weights(rollouts.replace(mask=mask), "token_mean") for name, mask in sides.items()}

    def token_loss(logprobs, rollouts, advantages):
        moved = moved_tokens(rollouts)
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        own, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped & ~moved, "moved_fraction": moved, "max/ratio": jnp.where(moved, 0, ratio)}
        return {"policy": own, "moved": -moved_coef * logprobs}, metrics

    return token_objective(token_loss, extra_weights=shares, reads_old=True)


def moved_tokens(rollouts: Rollouts) -> Array:
    """bool[P, G, T], trained tokens that the policy wrote under another text."""
    if rollouts.role is None:
        return jnp.zeros(rollouts.mask.shape, bool)
    return rollouts.token_mask & (rollouts.role == Role.ELSEWHERE)

"""ReMix: rollouts of recent policies reused under a trust region around the current one (arXiv 2507.06892)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.kl import token_kl
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


def base_share(step: int | Array) -> Array:
    """Weight of the base model in the KL term: 1 for 50 steps, then 0.1 less for every 10 steps begun, at least 0.5."""
    return jnp.maximum(1 - 0.1 * jnp.ceil(jnp.maximum(step - 50, 0) / 10), 0.5)


@objective
def remix(*, clip_low: float = 0.2, clip_high: float = 0.2, anchor_coef: float = 1e-3,
          anchor_estimator: str = "k3") -> Objective:
    """`max(-A r, -A clip(r, c - clip_low, c + clip_high)) + anchor_coef [share KL_base + (1 - share) KL_old]`, token mean.

    `r = exp(new - behaviour)`, `c = exp(old - behaviour)` of log-probs: behaviour is the stored policy that sampled the
    row, old the policy at the start of this step, so that c = 1 (PPO) on fresh rows. KL_base is to `ref_logprobs`: first
    the start model; after the switch to plain on-policy training (`control.remix`), which uses only fresh rows, the policy
    frozen at the switch. `share` is `base_share` of the step `extras["current_version"]` i32[P]. No code is public:
    clip range, `anchor_coef`, the k3 estimator and the token mean are our choices.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = token_ratio(logprobs, rollouts.behavior_logprobs, mask)
        centre = token_ratio(rollouts.old_logprobs, rollouts.behavior_logprobs, mask)
        # clip(r, c - low, c + high) = clip(r, 1 - (1 - c + low), 1 + (c - 1 + high))
        loss, clipped = clipped_surrogate(ratio, advantages, 1 - centre + clip_low, centre - 1 + clip_high)
        base = token_kl(logprobs, rollouts.ref_logprobs, anchor_estimator)
        previous = token_kl(logprobs, rollouts.old_logprobs, anchor_estimator)
        share = base_share(rollouts.extras["current_version"])[:, None, None]
        loss = loss + anchor_coef * (share * base + (1 - share) * previous)
        return loss, {"clip_fraction": clipped, "kl": base, "kl_previous": previous, "max/ratio": ratio}

    return token_objective(token_loss, needs=("behavior_logprobs", "old_logprobs", "ref_logprobs", "current_version"),
                           reads_old=True, unknown="old")

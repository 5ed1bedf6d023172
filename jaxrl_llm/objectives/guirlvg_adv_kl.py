"""GuirlVG: the higher a rollout's reward, the stronger its KL penalty to the reference (arXiv 2508.04389)."""
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.kl import token_kl
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def guirlvg_adv_kl(*, clip_low: float = 0.2, clip_high: float = 0.2, reward_kl_coef: float = 1e-4, max_reward: float = 2.0,
                   aggregation: str = "seq_mean_token_mean", max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho)) + reward_kl_coef * alpha_i * k3_t`, `alpha_i = clip(r_i / max_reward, 0, 1)`.

    `max_reward` is the largest total reward a rollout can get (the paper's: 1 for format and 1 for accuracy). A rollout
    with reward 0 has no KL term; a group of equal, positive rewards still has one. Aggregation and clip range are those of
    GRPO, which the paper does not restate; `reward_kl_coef` is the paper's.
    """
    if max_reward <= 0:
        raise ValueError(f"max_reward={max_reward} must be positive: the largest reward that can be attained")

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        divergence = token_kl(logprobs, rollouts.ref_logprobs)
        alpha = jnp.clip(rollouts.rewards / max_reward, 0, 1)
        metrics = {"clip_fraction": clipped, "kl": divergence, "alpha": alpha}
        return loss + reward_kl_coef * alpha[..., None] * divergence, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("rewards", "ref_logprobs"),
                           reads_old=True)

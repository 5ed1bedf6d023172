"""RL-PLUS: expert tokens weighted by multiple importance sampling and by how unlikely they were (arXiv 2508.00222)."""
import math

import jax.numpy as jnp
from jax import lax

from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.luffy import mixed_policy, probability
from jaxrl_llm.tools import registry


@objective
def rl_plus(*, gamma: float = 0.5, uniform: float = 1.0, variant: str = "mis", clip_low: float = math.inf,
            clip_high: float = math.inf, aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """Own tokens: `l = -A rho`; expert tokens: `l = -rm * A * sg((1 - p)^gamma)`, p = exp(logprobs).

    `rm = 2 p / (p_old + w)`, `w = (p_old + uniform) / 2` stands for the unknown probability under the expert, so that rm stays
    bounded (at most 4 for p_old = 0). `gamma` and `uniform` are the released code's, whose run also has no clipping; the
    paper's uniform policy is 1 / vocabulary. `old_logprobs` are needed on expert tokens too. `variant="target"` has `rm = p /
    (expert probability + 1e-6)` from `extras["expert_logprobs"]`. See `luffy` for the aggregation.
    """
    registry.one_of("variant", variant, ("mis", "target"))

    def expert_weight(logprobs, rollouts):
        mask = rollouts.token_mask
        prob = probability(logprobs, mask)
        if variant == "target":
            ratio = prob / (jnp.exp(rollouts.extras["expert_logprobs"]) + 1e-6)
        else:
            old = probability(rollouts.old_logprobs, mask)
            ratio = 2 * prob / (old + (old + uniform) / 2)
        return ratio * lax.stop_gradient(jnp.maximum(1 - prob, 0) ** gamma)

    return mixed_policy(expert_weight, clip_low=clip_low, clip_high=clip_high, aggregation=aggregation, max_len=max_len,
                        needs=("expert_logprobs",) if variant == "target" else ("old_logprobs",))

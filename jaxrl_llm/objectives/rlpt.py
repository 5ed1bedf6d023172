"""RLPT: the clipped loss of next segments beside that of middle ones (arXiv 2509.19249)."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools.ranges import NOT_NEGATIVE


@objective(ranges={"middle_coef": NOT_NEGATIVE})
def rlpt(*, middle_coef: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Objective:
    """`mean of l_t over tokens of next segments + middle_coef * mean of l_t over tokens of middle ones`, l_t as of `ppo_clip`.

    `extras["middle"]` f32[P] is 1 for prompts that ask for a segment in the middle. The paper gives no number for the
    coefficient, nor for the clip range. Metrics: `clip_fraction`, `approx_kl` and `max/ratio` as of `ppo_clip`.
    """
    def shares(rollouts):
        middle = rollouts.extras["middle"][:, None, None] > 0
        mask, share = rollouts.token_mask, jnp.zeros(rollouts.mask.shape)
        for some, coef in ((mask & ~middle, 1.0), (mask & middle, middle_coef)):
            share = share + jnp.where(some, coef / jnp.maximum(masked.count(some), 1), 0)
        return {"kinds": share}

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        return {"kinds": loss}, {"clip_fraction": clipped, "max/ratio": ratio,
                                 "approx_kl": -log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)}

    return token_objective(token_loss, needs=("middle",), extra_weights=shares, shares="kinds", reads_old=True)

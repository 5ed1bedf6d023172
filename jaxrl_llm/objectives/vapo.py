"""VAPO: PPO's clipped surrogate with a wider upper clip and the likelihood of right answers (arXiv 2504.05118)."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def vapo(*, clip_low: float = 0.2, clip_high: float = 0.28, nll_coef: float = 0.1) -> Objective:
    """`mean of max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) - nll_coef * mean over right answers of log p`.

    The first mean is over all tokens, the second over the tokens of right answers, 0 without any. The numbers are the
    paper's. Needs `rewards` (right: above 1/2, or as recorded in `extras["correct"]`).
    """

    def right_weights(rollouts):
        mask = rollouts.token_mask & rollouts.correct[..., None]
        return {"right": jnp.where(mask, 1 / jnp.maximum(masked.count(mask), 1), 0)}

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        surrogate, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped, "max/ratio": ratio,
                   "approx_kl": -log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)}
        return {"loss": surrogate, "right": -nll_coef * logprobs}, metrics

    return token_objective(token_loss, needs=("rewards",), extra_weights=right_weights, reads_old=True)

"""LightningRL: clipped surrogate, KL to a reference and the likelihood of right answers as an anchor."""
import jax.numpy as jnp

from jaxrl_llm.control import lightningrl as filters
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.objectives.restrict import restrict
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry

LOG_LIMIT = 10.0


@objective
def lightningrl(*, clip_low: float = 0.2, clip_high: float = 0.2, right_coef: float = 0.1, perf: str = "perf",
                min_range: float = 0.01) -> Objective:
    """`clipped + right_coef * NLL`, each with its own denominator; terms that are added are means over all tokens.

    `clipped`: token mean inside each rollout of `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`, then the mean over
    rollouts; NLL = -log p over the tokens of right answers that are not truncated, 0 without any. Log-ratios are clamped to
    +-10. Prompts that the estimator `lightningrl` drops (with its `perf` and `min_range`) are in no term, nor in its
    denominator. The numbers are those of the authors' code, which has a term `kl(0.01)`.
    Needs `rewards` (0 or 1) and the extras of the estimator.
    """
    registry.one_of("perf", perf, ("perf", "length"))

    def right(rollouts):
        return rollouts.token_mask & (filters.accuracy(rollouts) > 0)[..., None]

    def right_weights(rollouts):
        mask = right(rollouts)
        return {"right": jnp.where(mask, 1 / jnp.maximum(masked.count(mask), 1), 0)}

    def token_loss(logprobs, rollouts, advantages):
        drift = log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask, limit=LOG_LIMIT)
        ratio = jnp.exp(drift)
        surrogate, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        losses = {"loss": surrogate, "right": -right_coef * logprobs}
        return losses, {"clip_fraction": clipped, "max/ratio": ratio, "approx_kl": -drift}

    def kept(rollouts):
        speed = filters.efficiency(rollouts, perf)
        keep = filters.has_signal(filters.accuracy(rollouts), speed, rollouts.valid, min_range=min_range)
        return rollouts.valid & keep[:, None]

    needs = ("rewards", "truncated") if perf == "length" else ("rewards", "truncated", "perf")
    whole = token_objective(
        token_loss, aggregation="seq_mean_token_mean", needs=needs, extra_weights=right_weights,
        reads_old=True, shares="token")
    return restrict(whole, kept, needs=needs)

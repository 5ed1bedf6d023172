"""Agentic entropy-balanced policy optimisation: clipping that keeps a gradient (arXiv 2510.14545)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import Rollouts, check
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped


def entropy_score(rollouts: Rollouts) -> dict[str, Array]:
    """`{"entropy_score": z}`, z [P, G, T]: the entropies' z-score over all tokens; sample std, 1 if that is 0."""
    mask, entropies = rollouts.token_mask, check(rollouts, "entropies").entropies
    spread = masked.std(entropies, mask, ddof=1)
    score = (entropies - masked.mean(entropies, mask)) / jnp.where(spread > 0, spread, 1)
    return {"entropy_score": jnp.where(mask, score, 0)}


def kept_gradient_clip(ratio: Array, clip_low: float, clip_high: float) -> Array:
    """`clip(ratio, 1 - clip_low, 1 + clip_high)`; above the upper bound the slope in log ratio is the bound, not 0."""
    low, high = 1 - clip_low, 1 + clip_high
    above = high * ratio / lax.stop_gradient(ratio)
    return jnp.where(ratio > high, above, jnp.where(ratio < low, low, ratio))


@objective
def aepo_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0, entropy_scale: float = 0.2,
              aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = max(-A' rho, -A' b)`, `A' = A (1 + entropy_scale * z_t)`, at most `-A' * dual_clip` where A' < 0.

    b is `kept_gradient_clip` of rho: a token above the upper bound with A' > 0 keeps the gradient of a ratio at the
    bound. z is the z-score over the mini-batch's tokens of the `entropies` recorded with the rollouts, detached. A'
    changes sign where `z < -1 / entropy_scale`; the metric `sign_flips` is the share of such tokens. `entropy_scale=0`
    keeps A. The paper speaks of high-entropy tokens; like its code, this treats every token above the bound alike.
    `entropy_scale` is its code's too; run scripts there have `clip_high` between 0.2 and 0.28.
    """

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        metrics = {"max/ratio": ratio, "kept_gradient": (ratio > 1 + clip_high) & (advantages > 0)}
        if entropy_scale:
            factor = 1 + entropy_scale * (rollouts.loss_weights or entropy_score(rollouts))["entropy_score"]
            advantages, metrics["sign_flips"] = advantages * factor, factor < 0
        loss = jnp.maximum(-advantages * ratio, -advantages * kept_gradient_clip(ratio, clip_low, clip_high))
        loss, metrics["clip_fraction_lower"] = dual_clipped(loss, advantages, dual_clip)
        return loss, metrics

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=("entropies",) if entropy_scale else (),
        extra_weights=entropy_score if entropy_scale else None, reads_old=True)

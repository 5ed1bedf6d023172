"""REC: one loss with REINFORCE and GRPO, and with terms mirror descent and AsymRE, as special cases (arXiv 2509.24203)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import LIMIT, log_ratio
from jaxrl_llm.objectives.trust_region import inside, still_moving
from jaxrl_llm.tools import registry

CLIPS = ("none", "one_side", "two_side", "ring")
WEIGHTS = ("none", "importance_sampling", "advantage")


@objective
def rec_family(*, clip: str = "one_side", weight: str = "none", clip_low: float = 0.2, clip_high: float = 0.2,
               ring_low: float = 0.6, ring_high: float = 2.0, temperature: float = 1.0, aggregation: str = "token_mean",
               max_len: int | None = None) -> Objective:
    """`l_t = -W_t M_t log p_t`, W and M detached; masked tokens stay in the denominator.

    M (`clip`): `none` 1; `one_side` PPO's region, where moving along A still leads inwards; `two_side`
    `1 - clip_low <= rho <= 1 + clip_high`; `ring` two_side, or A >= 0 with `rho <= 1 - ring_low`, or A <= 0 with
    `rho >= 1 + ring_high` (far outside, but moving back).
    W (`weight`): `none` A; `importance_sampling` A rho; `advantage` `A exp(A / temperature)`,
    the exponent clamped to +-20.
    The regularisers of the paper are terms: `kl(2 c, estimator=k2, against=old)` adds `c (log rho)^2`, `nll(c, on=all)` the
    forward KL `-c log p`, both with c 0.1. The defaults are Trinity-RFT's (its constructor has 0.4 for both ring bounds); the
    paper also tries `one_side` with 0.6 and 2.0.
    """
    registry.one_of("clip", clip, CLIPS)
    registry.one_of("weight", weight, WEIGHTS)

    def region(ratio: Array, advantages: Array) -> Array:
        if clip == "none":
            return jnp.ones_like(ratio, bool)
        if clip == "one_side":
            return still_moving(ratio, advantages, clip_low, clip_high)
        near = inside(ratio, 1 - clip_low, 1 + clip_high)
        if clip == "two_side":
            return near
        returning = ((advantages >= 0) & (ratio <= 1 - ring_low)) | ((advantages <= 0) & (ratio >= 1 + ring_high))
        return near | returning

    def token_loss(logprobs, rollouts, advantages):
        change = log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        ratio = lax.stop_gradient(jnp.exp(change))
        keep = region(ratio, advantages)
        growth = jnp.exp(jnp.clip(advantages / temperature, -LIMIT, LIMIT))
        scale = {"none": 1, "importance_sampling": ratio, "advantage": growth}[weight]
        loss = -jnp.where(keep, advantages * scale, 0) * logprobs
        return loss, {"clip_fraction": ~keep, "max/ratio": ratio, "approx_kl": -change}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, reads_old=True)

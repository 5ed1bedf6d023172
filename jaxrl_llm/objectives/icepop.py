"""IcePop: tokens where trainer and sampler disagree too much are masked, others re-weighted (arXiv 2510.18855)."""
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import bounded, importance
from jaxrl_llm.objectives.tis_mis import tis_mis


@objective
def icepop(*, min_ratio: float = 0.5, max_ratio: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2,
           aggregation: str = "seq_mean_token_mean", max_len: int | None = None) -> Objective:
    """`l_t = M_t max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`, rho = exp(new - old log-prob).

    `M = k` where `min_ratio <= k <= max_ratio`, else 0; `k = exp(old_logprobs - behavior_logprobs)`, detached. Masked
    tokens stay in the denominator. This is `tis_mis` with token weights masked by an asymmetric band. The band is
    Ring-1T's; GLM-5's is [1 / max_ratio, max_ratio] with a clip range of 0.2 and 0.28.
    """
    return tis_mis(bound="mask", min_ratio=min_ratio, max_ratio=max_ratio, clip_low=clip_low, clip_high=clip_high,
                   aggregation=aggregation, max_len=max_len)


@objective
def icepop_direct(*, min_ratio: float = 0.5, max_ratio: float = 5.0, veto: float | None = 1e-5,
                  aggregation: str = "prompt_mean", max_len: int | None = None) -> Objective:
    """`l_t = -M_t A_t log p_t`, with IcePop's band on `k = exp(new - behaviour log-prob)`, detached, and no clip.

    A rollout that has a token with k < `veto` is dropped; it stays in the denominator. This form and `veto` are
    INTELLECT-3's, the band is Ring-1T's.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = importance(logprobs, rollouts.behavior_logprobs, mask)
        weight = bounded(ratio, "mask", min_ratio, max_ratio)
        if veto is not None:
            weight = jnp.where(jnp.any(mask & (ratio < veto), axis=-1, keepdims=True), 0, weight)
        return -weight * advantages * logprobs, {"mask_fraction": weight == 0, "max/ratio": ratio}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")

"""HisPO: gates sequences, then tokens, by the engines' discrepancy, and clips the whole ratio (arXiv 2603.21065)."""
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import importance
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped


@objective
def hispo(*, sequence_gate: float = 0.1, token_gate: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.28,
          dual_clip: float = 3.0, aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """`l_t = H_t max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, at most `-A dual_clip` where A < 0.

    `r = exp(new - behaviour log-prob)`. With `k = exp(old - behaviour log-prob)`, detached: H = 1 where
    `|k_t - 1| < token_gate` and `|geometric mean of k - 1| < sequence_gate`, else 0; gated tokens stay in the
    denominator. The paper gives none of these numbers; the three-sided clip follows its predecessor's report.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask, behavior = rollouts.token_mask, rollouts.behavior_logprobs
        near = jnp.abs(importance(rollouts.old_logprobs, behavior, mask) - 1) < token_gate
        whole = jnp.abs(importance(rollouts.old_logprobs, behavior, mask, "geometric") - 1) < sequence_gate
        ratio = token_ratio(logprobs, behavior, mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        loss, lower = dual_clipped(loss, advantages, dual_clip)
        metrics = {"kept_fraction": near & whole, "sequence_kept_fraction": whole, "clip_fraction": clipped,
                   "clip_fraction_lower": lower, "max/ratio": ratio}
        return jnp.where(near & whole, loss, 0), metrics

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=("old_logprobs", "behavior_logprobs"), unknown="old",
        reads_old=True)

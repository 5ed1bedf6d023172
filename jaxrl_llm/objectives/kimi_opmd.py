"""Online policy mirror descent of Kimi k1.5: fit log-ratios of whole completions to rewards (arXiv 2501.12599)."""
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.tools import registry

VARIANTS = ("canonical", "exact", "pairwise", "simple")


def _weights(rollouts: Rollouts):
    """`prompt`: mean over prompts of the mean over their live rollouts; `sum`: 1; both [P, G], 0 for rollouts not live."""
    n = masked.count(rollouts.live, axis=1, keepdims=True)
    share = 1 / jnp.maximum(masked.count(n > 0) * n, 1)
    return {"prompt": jnp.where(rollouts.live, share, 0), "sum": jnp.where(rollouts.live, 1.0, 0.0)}


@objective
def kimi_opmd(*, tau: float = 1.0, variant: str = "canonical", length_normalised: bool = False) -> Objective:
    """At the optimum of `E[r] - tau * KL(policy || old)` each `r - tau log Z` equals `tau * D`, D = sum_t log-ratio.

    A = r - b estimates `r - tau log Z`. Per rollout, averaged over each prompt's rollouts and then over prompts:
      `canonical`  -sum_t A log p_t + tau / 2 * D^2, the report's update; per token its gradient is -A + tau D
      `exact`      (A - tau D)^2
      `pairwise`   sum over pairs i < j of a prompt of (a_i - a_j)^2, a = A - tau D, summed over prompts; log Z cancels
      `simple`     -A log p_t / (1 + tau), token mean, without D
    `length_normalised` replaces the sums over t by means over tokens. The report gives no `tau` (Trinity-RFT has 1, ROLL
    0.1) and clears the optimiser's state whenever the old policy is renewed; the average over prompts is our reading.
    """
    registry.one_of("variant", variant, VARIANTS)
    over_tokens = masked.mean if length_normalised else masked.sum

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        change = over_tokens(log_ratio(logprobs, rollouts.old_logprobs, mask, limit=jnp.inf), mask, axis=-1)
        residual = masked.mean(advantages, mask, axis=-1) - tau * change
        metrics = {"sequence_log_ratio": change, "residual": jnp.abs(residual)}
        if variant == "simple":
            return -advantages * logprobs / (1 + tau), metrics
        if variant == "canonical":
            return {"prompt": tau / 2 * change**2 - over_tokens(advantages * logprobs, mask, axis=-1)}, metrics
        if variant == "exact":
            return {"prompt": residual**2}, metrics
        # sum_{i<j} (a_i - a_j)^2 = n * sum_i (a_i - mean a)^2
        n = masked.group_count(rollouts.live).astype(residual.dtype)
        return {"sum": n * (residual - masked.group_mean(residual, rollouts.live)) ** 2}, metrics

    return token_objective(token_loss, extra_weights=_weights, reads_old=True,
                           shares="loss" if variant == "simple" else "prompt")

"""Guide-GRPO: what was written under a hint is trained without it, by a shaped ratio without a clip (arXiv 2506.13923)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.ranges import POSITIVE, SHARE

SHAPINGS = ("percentile", "constant", "power", "none")
LEAST = 1e-4  # of the percentile, as in the authors' code


@objective(ranges={"q": SHARE, "gamma": POSITIVE})
def guide_grpo(*, shaping: str = "percentile", q: float = 0.9, gamma: float = 0.1, over: str = "rollout", clip_low: float = 0.2,
               clip_high: float = 0.2, aggregation: str = "seq_mean_token_mean", max_len: int | None = None) -> Objective:
    """`l = -A f(rho)`, `rho = p / p_written`, on tokens with `written_logprobs`; on others PPO's clipped loss.

    `p` is the probability under the prompt, `p_written` that under what the policy read when it wrote, before its updates.
    `f(rho) = rho / (rho + gamma)`, whose slope by log p, `gamma rho / (rho + gamma)^2`, is largest at rho = gamma. With
    `percentile` gamma is the q-quantile of rho, at least 1e-4 and without a gradient, over the hinted tokens of the `rollout`,
    or with `over="batch"` of the mini-batch. `constant` takes `gamma`, `power` is `rho^gamma`, `none` is rho.

    The numbers are those of the authors' runs, in whose micro-batches of one rollout the quantile is that of the rollout and
    the loss the mean over rollouts of their token means. Their quantile runs over padding too; this one does not. Metrics:
    `hinted_fraction`, the share of hinted tokens; `max/hinted_ratio`, their largest rho.
    """
    registry.one_of("shaping", shaping, SHAPINGS)
    registry.one_of("over", over, ("rollout", "batch"))

    def shaped(rho: Array, hinted: Array) -> Array:
        if shaping in ("none", "power"):
            return rho if shaping == "none" else rho**gamma
        level = jnp.asarray(gamma, rho.dtype)
        if shaping == "percentile":
            known = lax.stop_gradient(jnp.where(hinted, rho, jnp.nan))
            level = jnp.nanquantile(known, q, axis=-1 if over == "rollout" else None, keepdims=True)
            level = jnp.maximum(jnp.where(jnp.isnan(level), LEAST, level), LEAST).astype(rho.dtype)
        return rho / (rho + level)

    def token_loss(logprobs, rollouts, advantages):
        mask, written = rollouts.token_mask, rollouts.extras["written_logprobs"]
        hinted = mask & ~jnp.isnan(written)
        old = logprobs if rollouts.old_logprobs is None else rollouts.old_logprobs
        ratio = token_ratio(logprobs, jnp.where(hinted, written, lax.stop_gradient(old)), mask)
        plain, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped & ~hinted, "hinted_fraction": hinted, "max/ratio": jnp.where(hinted, 0, ratio),
                   "max/hinted_ratio": jnp.where(hinted, ratio, 0)}
        return jnp.where(hinted, -advantages * shaped(ratio, hinted), plain), metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("written_logprobs",), reads_old=True,
                           whole_batch=shaping == "percentile" and over == "batch")

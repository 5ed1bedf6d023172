"""REINFORCE (Williams 1992) with no, batch-mean or moving-average baseline, and REINFORCE++ (arXiv 2501.03262)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

VARIANTS = ("none", "batch_mean", "ema", "rfpp", "rfpp_baseline")


@estimator
def reinforce(*, variant: str = "none", gamma: float = 1.0, kl_coef: float = 0.0, ema_decay: float = 0.95,
              ema_init: float = 0.0, whiten_eps: float = 1e-8, unbiased: bool = True, singleton: str = "zero") -> Estimator:
    """Reward minus a baseline; only `rfpp_baseline` needs groups.

    `variant`:
      `none`          A = r
      `batch_mean`    A = r - mean of r over the batch
      `ema`           A = r - b, then b <- ema_decay * b + (1 - ema_decay) * mean of r (b starts at `ema_init`)
      `rfpp`          A = whiten(R), R_t = tau_t + gamma * R_{t+1},
                      tau_t = r * [t is the last token] - kl_coef * (old_logprobs - ref_logprobs)_t
      `rfpp_baseline` A = whiten(r - group mean); with `singleton="raw"` a group of one keeps its reward
    `whiten` is over all tokens of the batch, with the sample variance if `unbiased`. Because of it, an all-equal group
    does not get advantage 0 under `rfpp_baseline` when response lengths differ. `whiten_eps` and the sample variance
    are verl's (OpenRLHF: population variance, at least 1e-8); the paper has a small `kl_coef` for `rfpp`.
    """
    registry.one_of("variant", variant, VARIANTS)
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def whiten(x_PGT, mask):
        return masked.whiten(x_PGT, mask, eps=whiten_eps, ddof=int(unbiased))

    def batch_mean(rollouts):
        return rollouts.rewards - masked.mean(rollouts.rewards, rollouts.valid)

    def ema(rollouts, baseline):
        mean = masked.mean(rollouts.rewards, rollouts.fresh)  # of the policy's own: a pool adds rollouts of others
        moved = ema_decay * baseline + (1 - ema_decay) * mean
        return rollouts.rewards - baseline, jnp.where(jnp.any(rollouts.fresh), moved, baseline)

    def rfpp(rollouts):
        mask = rollouts.token_mask
        token_rewards = jnp.where(masked.last_token(mask), rollouts.rewards[..., None], 0)
        if kl_coef:
            token_rewards -= kl_coef * (rollouts.old_logprobs - rollouts.ref_logprobs)
        return whiten(masked.discounted_return(token_rewards, mask, gamma=gamma), mask)

    def rfpp_baseline(rollouts):
        baseline = masked.group_mean(rollouts.rewards, rollouts.valid)
        if singleton == "raw":
            baseline = masked.unless_alone(baseline, rollouts.valid)
        mask = rollouts.token_mask
        return whiten(masked.to_tokens(rollouts.rewards - baseline, mask), mask)

    if variant == "ema":
        return stateful(lambda: jnp.float32(ema_init), ema)
    if variant == "rfpp":
        return stateless(rfpp, needs=("rewards", "old_logprobs", "ref_logprobs") if kl_coef else ("rewards",))
    plain = {"none": lambda rollouts: rollouts.rewards, "batch_mean": batch_mean, "rfpp_baseline": rfpp_baseline}
    return stateless(plain[variant])

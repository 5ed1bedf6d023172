"""ScaleRL's advantage: group mean, batch standard deviation, no prompts without a signal (arXiv 2510.13786)."""
import math

import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful, stateless
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def scalerl(*, variant: str = "batch", rate: float = 1e-3, eps: float | None = None) -> Estimator:
    """`A = a / (sigma + eps)`, `a = r - group mean`, sigma the population std of a over all rollouts of kept prompts.

    Prompts whose rewards are all equal are dropped, in the aggregation `prompt_mean` too: A is multiplied by (number of
    prompts with tokens) / (number of kept ones). They are not replaced by new samples. The paper leaves eps (1e-6) and the
    kind of std open. `variant="running"`, as in TRL's trainer (with rate 1e-3, eps 1e-4), uses as sigma the root of a moving
    mean of a^2, the state: every kept rollout renews the share `rate` of it; the rollouts of a batch are counted together,
    so that their order does not matter, and the first batch sets it.
    Prompts that are nearly always solved leave the data set: `jaxrl_llm.control.pass_rate`.
    """
    registry.one_of("variant", variant, ("batch", "running"))
    if eps is None:
        eps = 1e-6 if variant == "batch" else 1e-4

    def parts(rollouts):
        """(a [P, G], prompts kept [P, 1], prompts with tokens [P, 1])."""
        rewards, valid = rollouts.rewards, rollouts.valid
        real = jnp.any(rollouts.live, axis=1, keepdims=True)
        keep = real & (masked.group_std(rewards, valid, ddof=0) > 0)
        return rewards - masked.group_mean(rewards, valid), keep, real

    def by_batch(rollouts):
        centred, keep, real = parts(rollouts)
        sigma = masked.std(centred, rollouts.valid & keep, ddof=0, keepdims=True)
        return over_kept(centred / (sigma + eps), keep, real)

    def by_history(rollouts, moment):
        centred, keep, real = parts(rollouts)
        counted = rollouts.valid & keep
        renewed = jnp.where(moment > 0, -jnp.expm1(math.log1p(-rate) * masked.count(counted)), 1)
        change = renewed * (masked.mean(centred**2, counted) - moment)
        moment = jnp.where(jnp.any(counted), moment + change, moment).astype(moment.dtype)
        return over_kept(centred / (jnp.sqrt(moment) + eps), keep, real), moment

    return stateless(by_batch) if variant == "batch" else stateful(lambda: jnp.float32(0), by_history)

"""ScaleRL's advantage: group mean, batch standard deviation, prompts without a signal left out (arXiv 2510.13786)."""

import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.selection import over_kept


@estimator
def scalerl(*, eps: float = 1e-6) -> Estimator:
    """`A = a / (sigma + eps)`, `a = r - group mean`, sigma the population std of a over all rollouts of kept prompts.

    Prompts whose rewards are all equal are dropped, in the aggregation `prompt_mean` too: A is multiplied by (number of
    prompts with tokens) / (number of kept ones). Nothing is sampled in their place. The paper leaves eps and the kind
    of std open. Prompts that are solved nearly always leave the data set: `jaxrl_llm.control.pass_rate`.
    """

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        centred = rewards - masked.group_mean(rewards, valid)
        real = jnp.any(rollouts.live, axis=1, keepdims=True)
        keep = real & (masked.group_std(rewards, valid, ddof=0) > 0)
        sigma = masked.std(centred, valid & keep, ddof=0, keepdims=True)
        return over_kept(centred / (sigma + eps), keep, real)

    return stateless(advantages)

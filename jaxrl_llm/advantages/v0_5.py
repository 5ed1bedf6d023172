"""V0.5: rewards minus a baseline fused from a prior and the group's mean (arXiv 2603.10848)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.maths import masked
from jaxrl_llm.values import v0_5 as shrinkage
from jaxrl_llm.values.v0_5 import fuse


@estimator
def v0_5(*, variance: float = 0.25, cost: float | None = None, leave_one_out: bool = False, norm_std: bool = False,
         eps: float = 1e-6) -> Estimator:
    """`A_i = r_i - b`, `b = prior + w (mean - prior)`, see `jaxrl_llm.values.v0_5.fuse`; groups may differ in size.

    `extras["prior"]` f32[P] is a guess of each prompt's mean reward, made without these rollouts. `variance` bounds the
    variance of a reward: 1/4 for {0, 1}, 1 for -1 and 1 (the paper's). A group of equal rewards keeps the signal
    `r - b`, unless the prior equals r.

    Wherever the prior is not fully trusted, the baseline depends on the rewards it is subtracted from. `leave_one_out` computes
    the mean and its weight from the other rollouts of the group, which removes this bias (not in the paper).
    `norm_std` divides by the group's sample deviation + eps where rewards differ; the paper does not.

    A prompt is sampled again while one more rollout lowers the baseline's squared error by more than `cost`: as often as the
    known rewards say so, and at most a group at a time; see `jaxrl_llm.values.v0_5.wanted`.

    Metrics, means over prompts: `rollouts` used, share of priors `rejected`, `weight` of the mean, `prior_mean`, and
    `prior_error`, the squared distance of prior and group mean, including the noise of the mean.
    """

    shrinkage.check_variance(variance)

    def advantages(rollouts, state):
        rewards, valid = rollouts.rewards, rollouts.valid
        prior, count = rollouts.extras["prior"][:, None], masked.group_count(valid)
        if leave_one_out:
            mean, count = masked.leave_one_out_mean(rewards, valid), count - 1
        else:
            mean = masked.group_mean(rewards, valid)
        values = rewards - fuse(prior, mean, count, variance=variance).baseline
        if norm_std:
            deviation = masked.group_std(rewards, valid, ddof=1)
            values = values / jnp.where(deviation > 0, deviation + eps, 1)
        return values, state

    def metrics(rollouts, advantages, state):
        rewards, valid, prior = rollouts.rewards, rollouts.valid, rollouts.extras["prior"]
        count, some = masked.group_count(valid)[:, 0], jnp.any(valid, axis=1)
        mean = masked.group_mean(rewards, valid)[:, 0]
        fused = fuse(prior, mean, count, variance=variance)
        values = {"rollouts": count, "rejected": fused.rejected.astype(mean.dtype), "weight": fused.weight,
                "prior_mean": prior, "prior_error": (prior - mean) ** 2}
        return {f"v0_5/{name}": masked.mean(x, some) for name, x in values.items()}

    def wants_more(rollouts, first, most):
        rewards, valid = rollouts.rewards, rollouts.valid
        count, mean = masked.group_count(valid)[:, 0], masked.group_mean(rewards, valid)[:, 0]
        fused = fuse(rollouts.extras["prior"], mean, count, variance=variance)
        more = shrinkage.wanted(fused, count, variance=variance, k_init=first, k_max=most, cost=cost)
        return jnp.minimum(more, first)

    return stateful(lambda: (), advantages, needs=("rewards", "prior"), metrics=metrics, wants_more=wants_more)

"""Kimi k1.5's baseline: the group mean, or the log of the mean exponentiated reward (arXiv 2501.12599)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateful, stateless
from jaxrl_llm.advantages.soft_value import soft_value
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def length_reward(lengths_PG: Array, right_PG: Array, valid_PG: Array) -> Array:
    """f32[P, G]: `lam = 0.5 - (length - shortest) / (longest - shortest)` of valid rollouts, `min(0, lam)` where wrong.

    It is 0 if all valid rollouts have one length, and for rollouts that are not valid.
    """
    low = jnp.min(jnp.where(valid_PG, lengths_PG, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    high = jnp.max(jnp.where(valid_PG, lengths_PG, 0), axis=1, keepdims=True)
    lam = 0.5 - (lengths_PG - low) / jnp.maximum(high - low, 1)
    return jnp.where(valid_PG & (high > low), jnp.where(right_PG, lam, jnp.minimum(lam, 0)), 0)


@estimator
def kimi_opmd(*, baseline: str = "mean", tau: float = 1.0, length_weight: float = 0.0, length_warmup: int = 0) -> Estimator:
    """`A_i = r_i - b`; b is the group mean or, with `baseline="logavgexp"`, `tau * log mean_j exp(r_j / tau)`.

    The second is the normaliser of the policy that maximises `E[r] - tau * KL`: the mean for large `tau`, the maximum
    for small `tau`. A group of one has b = 0. The report does not give `tau`: Trinity-RFT has 1, ROLL 0.1. The rewards r
    get `length_weight` times the `length_reward` after `length_warmup` batches; the report has a warm-up without it, and gives
    neither number. Raises ValueError for another baseline, and fewer than 0 batches.
    """
    registry.one_of("baseline", baseline, ("mean", "logavgexp"))
    if length_warmup < 0:
        raise ValueError(f"length_warmup={length_warmup} batches without the length reward; give 0 or more")

    def advantages(rollouts, weight=length_weight):
        rewards, valid = rollouts.rewards, rollouts.valid
        if length_weight:
            rewards = rewards + weight * length_reward(rollouts.lengths, rollouts.correct, valid)
        soft = baseline == "logavgexp"
        b = soft_value(rewards, valid, temperature=tau) if soft else masked.group_mean(rewards, valid)
        return rewards - masked.unless_alone(b, valid)

    if not (length_weight and length_warmup):
        return stateless(advantages)
    return stateful(lambda: jnp.int32(0), lambda rollouts, batches: (
        advantages(rollouts, jnp.where(batches < length_warmup, 0.0, length_weight)), batches + 1))

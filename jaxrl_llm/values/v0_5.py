"""V0.5: a baseline between a prior and the mean of a few rollouts, and more rollouts where they disagree (arXiv 2603.10848).

    draws = first k_init rewards
    while wants_more(fuse(prior, mean, count), count): draw again
    A = r - fuse(prior, mean, count).baseline

The prior is any guess of the mean reward of a prompt: V0, a probe of the prompt's hidden states, a moving average of the
prompt's earlier rewards. `variance` is a bound on the variance of one reward, `((max - min) / 2)^2`: 1/4 for rewards in
{0, 1}, 1 for -1 and 1. It is not estimated from the rollouts, which are too few.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Fused(NamedTuple):
    """A prior fused with the mean of `count` rewards; all fields have the shape of the mean.

    baseline: `weight * mean + (1 - weight) * prior`.  weight: 0 where the prior is accepted.  bias2: the estimated
    squared bias of the prior.  mse: the estimated squared error of the baseline.
    """

    baseline: Array
    weight: Array
    bias2: Array
    mse: Array

    @property
    def rejected(self) -> Array:
        """bool: the mean is further from the prior than one standard error."""
        return self.bias2 > 0


def fuse(prior: Array | float, mean: Array, count: Array, *, variance: float) -> Fused:
    """The baseline of least squared error, if the prior's estimated bias were its true bias.

        bias2 = max(0, (mean - prior)^2 - variance / count),   weight = bias2 / (bias2 + variance / count)

    This is positive-part James-Stein shrinkage towards the prior: the prior is kept as it is while the mean is within
    one standard error of it. Shapes broadcast; without any reward (`count` 0) the baseline is the prior. Raises ValueError for
    a variance that is not positive and finite.
    """
    check_variance(variance)
    noise = variance / jnp.maximum(count, 1)
    bias2 = jnp.where(count > 0, jnp.maximum((mean - prior) ** 2 - noise, 0), 0)
    weight = bias2 / (bias2 + noise)
    return Fused(prior + weight * (mean - prior), weight, bias2, weight * noise)


def check_variance(variance: float) -> None:
    """Raises ValueError unless the variance is positive and finite: without noise a prior equal to the mean has no weight."""
    if not 0 < variance < float("inf"):
        raise ValueError(f"variance={variance} of a reward; give a positive finite number, 1/4 for rewards of 0 and 1")


def gain(bias2: Array, count: Array, *, variance: float) -> Array:
    """How much one more reward lowers the squared error, were the prior's squared bias `bias2`: `mse(count) - mse(count + 1)`,

    with `mse(k) = bias2 * variance / (k * bias2 + variance)`.
    """
    return bias2**2 * variance / ((count * bias2 + variance) * ((count + 1) * bias2 + variance))


def wants_more(fused: Fused, count: Array, *, variance: float, k_init: int = 4, k_max: int = 16, cost: float | None = None
               ) -> Array:
    """bool: prompts worth another reward, by looking one step ahead.

    True below `k_init`, False from `k_max` on, between them while `gain` is above `cost`: by default `variance / k_max^2`,
    which is the paper's 1/256 for rewards of -1 and 1. An accepted prior stops at once; a very wrong one at 15 of 16.
    """
    if not 1 <= k_init <= k_max:
        raise ValueError(f"k_init={k_init}, k_max={k_max}; they must satisfy 1 <= k_init <= k_max")
    cost = variance / k_max**2 if cost is None else cost
    more = gain(fused.bias2, count, variance=variance) > cost
    return (count < k_init) | (more & (count < k_max))


def wanted(fused: Fused, count: Array, *, variance: float, k_init: int = 4, k_max: int = 16, cost: float | None = None
           ) -> Array:
    """i32: how many further rewards `wants_more` asks for, one after another, if the estimated bias of the prior stays."""
    cost = variance / k_max**2 if cost is None else cost
    k = jnp.arange(k_max)
    worth = gain(fused.bias2[..., None], k, variance=variance) > cost
    more = jnp.sum((k >= count[..., None]) & worth, axis=-1, dtype=jnp.int32)
    return jnp.maximum(more, (k_init - count).astype(jnp.int32))


def draws_used(prior_P: Array, rewards_PK: Array, *, variance: float, k_init: int = 4, chunk: int = 1,
               cost: float | None = None) -> Array:
    """i32[P]: how many of K rewards, in the order of their draws, are used when every round draws `chunk` of them.

    K is the largest number allowed. It is for simulations and tables; online, the rounds of a sampler call `wants_more`.
    """
    K = rewards_PK.shape[1]
    count = jnp.arange(1, K + 1)
    mean = jnp.cumsum(rewards_PK, axis=1) / count
    fused = fuse(prior_P[:, None], mean, count, variance=variance)
    stop = ~wants_more(fused, count, variance=variance, k_init=k_init, k_max=K, cost=cost)
    round_ends = (count >= k_init) & ((count - k_init) % chunk == 0) | (count == K)
    return jnp.argmax(stop & round_ends, axis=1).astype(jnp.int32) + 1


class Risk(NamedTuple):
    """What to expect at one prompt: squared error of the baseline about the true mean, draws, probability of rejection."""

    mse: float
    draws: float
    rejected: float


def exact_risk(prior: float, true_mean: float, *, low: float = 0.0, high: float = 1.0, k_init: int = 4, k_max: int = 16,
               chunk: int = 1, cost: float | None = None) -> Risk:
    """The expectation over all sequences of rewards that are `low` or `high` with mean `true_mean`, in float64.

    With `k_init == k_max` the number of draws is fixed. The future depends only on the number of highs so far, so
    k_max^2 / 2 states are enough. Raises ValueError for a mean outside [low, high].
    """
    if not low <= true_mean <= high:
        raise ValueError(f"true_mean={true_mean} is not between low={low} and high={high}")
    variance, p = ((high - low) / 2) ** 2, (true_mean - low) / (high - low)
    k, highs = np.arange(1, k_max + 1)[:, None], np.arange(k_max + 1)
    with jax.enable_x64(True):
        fused = fuse(prior, jnp.asarray(low + (high - low) * highs / k), jnp.asarray(k), variance=variance)
        more = wants_more(fused, jnp.asarray(k), variance=variance, k_init=k_init, k_max=k_max, cost=cost)
        error, rejected = (np.asarray(fused.baseline) - true_mean) ** 2, np.asarray(fused.rejected)
    between_rounds = (k >= k_init) & ((k - k_init) % chunk == 0) | (k == k_max)
    stop, facts = ~np.asarray(more) & between_rounds, (error, np.broadcast_to(k, error.shape), rejected)
    alive, expected = np.eye(1, k_max + 1)[0], np.zeros(3)  # alive[j]: probability of drawing on after j highs
    for row in range(k_max):
        alive = alive * (1 - p) + np.roll(alive * p, 1)
        expected += [(alive * stop[row]) @ fact[row] for fact in facts]
        alive = alive * ~stop[row]
    return Risk(*map(float, expected))

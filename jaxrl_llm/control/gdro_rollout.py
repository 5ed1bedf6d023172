"""Rollout-GDRO: bins of prompts compete for numbers of rollouts under a fixed total (arXiv 2601.19280)."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import accuracy_bins, passes
from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.control.surrogate import by_place, check_signal, losses_of
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked


class Bandits(NamedTuple):
    """State: the walk, the bins of all problems, `gains` f32[B, K] of numbers of rollouts, `price` f32[] of a rollout.

    `group` i32[]: the arms are 1 to K times `group`. `arms` i32[B]: arms chosen for the next batch, from 0; -1 for a bin
    without a prompt in the batch. `usual` f32[B]: the moving mean of a bin's loss, NaN before its first loss.
    """

    walk: passes.Walk
    windows: accuracy_bins.Windows
    gains: Array
    price: Array
    group: Array
    arms: Array
    usual: Array


def arm_probabilities(gains_BK: Array, *, rate: float = 0.65, mix: float = 0.01) -> Array:
    """f32[B, K], summing to 1 in each bin: `(1 - mix) softmax(rate gain) + mix / K`."""
    return (1 - mix) * jax.nn.softmax(rate * gains_BK, axis=1) + mix / gains_BK.shape[1]


@functools.partial(jax.jit, static_argnums=(2, 3))
def joint_arms(counts_B: Array, probabilities_BK: Array, sizes: tuple[int, ...], total: int) -> Array:
    """i32[B]: the arms of largest joint probability with `sum_b counts_b sizes[arm_b] = total`; -1 for empty bins.

    `counts_B` i32[B]: prompts of each bin. Among equal choices the first bin takes the smallest arm, then the second bin. If no
    choice has that sum, the nearest sum is used, of two equally near the likelier. Dynamic programming over the sum takes
    O(B K total).
    """
    most = 2 * total + 1  # larger sums are farther from the total than 0 is
    value = jnp.full(most, -jnp.inf).at[0].set(0.0)
    sums, came = jnp.arange(most), []
    for counts, logs in zip(counts_B[::-1], jnp.log(probabilities_BK)[::-1]):
        before = jnp.stack([sums - counts * size for size in sizes])
        options = jnp.where(before >= 0, value[jnp.maximum(before, 0)], -jnp.inf) + logs[:, None]
        best = jnp.max(options, axis=0)
        came.append(jnp.argmax(options >= best - 1e-5, axis=0))  # sums of the same logarithms differ in their last digits
        value = jnp.where(counts > 0, best, value)
    reachable = jnp.isfinite(value)
    near = jnp.min(jnp.where(reachable, jnp.abs(sums - total), most))
    at, arms = jnp.argmax(jnp.where(reachable & (jnp.abs(sums - total) == near), value, -jnp.inf)), []
    for counts, arm in zip(counts_B, came[::-1]):
        arms.append(jnp.where(counts > 0, arm[at], -1))
        at = jnp.where(counts > 0, at - counts * jnp.asarray(sizes)[arm[at]], at)
    return jnp.stack(arms).astype(jnp.int32)


def played(gains_BK: Array, arms_B: Array, loss_B: Array, price: Array, sizes_K: Array, mean: Array | float, *, sign: int = 1
           ) -> Array:
    """f32[B, K]: gains after the arms `arms_B` (-1: none) had these losses: `gain += loss - price (n - mean)`.

    This follows the released code, whose arms gain where the loss is high. `sign=-1` is the paper's equation 20: `gain -=
    loss + price n`.
    """
    row, n = jnp.arange(arms_B.size), sizes_K[arms_B]
    change = loss_B - price * (n - mean) if sign > 0 else -loss_B - price * n
    return gains_BK.at[row, jnp.where(arms_B < 0, gains_BK.shape[1], arms_B)].add(change, mode="drop")


def of_problems(rollouts: Rollouts, ratios_PGT: Array, number: int) -> Array:
    """f32[N]: the mean `surrogate_loss` of each problem's rollouts; 0 without a rollout. A problem may have several rows."""
    place, counted = jnp.maximum(rollouts.prompt_ids, 0), rollouts.fresh & (rollouts.prompt_ids >= 0)[:, None]
    return by_place(losses_of(rollouts, ratios_PGT, place, counted, number), place, counted, number)[0]


@controller
def gdro_rollout(*, mean: int = 2, rate: float = 0.65, mix: float = 0.01, price_rate: float = 0.05, window: int = 100,
                  decay: float = 0.12, signal: str = "one_minus_pass") -> Controller:
    """`prompt_ids`, `group_sizes`: passes through all problems, whose bins pick numbers of rollouts, `mean` groups on average.

    The bins are the `accuracy_bins` from before the step. Their arms are 1, 2, ... groups up to `sampling.max_group`, chosen by
    `joint_arms` for a total of exactly `mean` groups per prompt, if some choice has this total. The dual price of a rollout
    rises with the surplus of rollouts, which is zero if the total is met. Facts: `tried`, `right`.

    The loss of an arm with `signal="one_minus_pass"`, ours and the default, is the wrong share of its bin's rollouts minus the
    moving mean of that share, updated with the weight `decay` in each step: the share itself is never negative, and would raise
    whichever arm is played first. With `surrogate` it is the paper's, the mean `surrogate_loss` of the bin's prompts, from the
    facts `rollouts` and `ratios`: it says how far the updates of the step moved the policy. Raises ValueError: fewer than one
    group per prompt, another signal; from `init`: a `sampling.max_group` that leaves nothing to choose.
    """
    by_surrogate = check_signal(signal)
    if mean < 1:
        raise ValueError(f"mean={mean} groups a prompt; give 1 or more")

    def chosen(walk, windows, gains):
        bins = jnp.where(walk.ids < 0, accuracy_bins.BINS, jnp.maximum(windows.bins, 0)[walk.ids])
        counts = jnp.zeros(accuracy_bins.BINS, jnp.int32).at[bins].add(1, mode="drop")
        probabilities = arm_probabilities(gains, rate=rate, mix=mix)
        return joint_arms(counts, probabilities, tuple(range(1, gains.shape[1] + 1)), mean * walk.ids.size)

    def observe(state, facts):
        tried, right = facts["tried"], facts["right"]
        seen, groups = tried > 0, jnp.arange(1, state.gains.shape[1] + 1)
        there = jnp.maximum(state.windows.bins, 0) == jnp.arange(accuracy_bins.BINS)[:, None]  # as when arms were chosen
        failed = jnp.where(tried > 0, 1 - right / jnp.maximum(tried, 1), 0)
        losses = of_problems(facts["rollouts"], facts["ratios"], seen.size) if by_surrogate else failed
        loss = masked.mean(jnp.broadcast_to(losses, there.shape), there & seen, axis=1)
        arms = jnp.where((there & seen).any(1), state.arms, -1)
        usual = jnp.zeros_like(loss) if by_surrogate else jnp.where(jnp.isnan(state.usual), loss, state.usual)
        gains = played(state.gains, arms, loss - usual, state.price, groups * state.group, mean * state.group)
        surplus = masked.mean(tried.astype(jnp.float32), seen) - mean * state.group
        price = jnp.where(seen.any(), state.price + price_rate * surplus, state.price)
        windows = accuracy_bins.visited(state.windows, seen, right > 0)
        bins = accuracy_bins.bins_of(accuracy_bins.accuracy(windows), windows.bins)
        windows = windows._replace(bins=jnp.where(seen, bins, windows.bins))
        walk = passes.advance(state.walk, tried, jnp.ones(seen.size, bool))
        usual = jnp.where(arms < 0, state.usual, (1 - decay) * usual + decay * loss)
        return Bandits(walk, windows, gains, price, state.group, chosen(walk, windows, gains), usual)

    def propose(state):
        arm = state.arms[jnp.maximum(state.windows.bins, 0)[state.walk.ids]]
        return {"prompt_ids": state.walk.ids, "group_sizes": state.group * (arm + 1)}

    def init(shares, batch, seed, group, max_group):
        if max_group <= mean * group:
            raise ValueError(f"sampling.max_group={max_group} is no more than the {mean} groups of {group} that prompts get on "
                             "average, so that all would get the same; raise it")
        walk, windows = passes.start(shares, batch, seed), accuracy_bins.unseen(shares.problems, window)
        gains = jnp.zeros((accuracy_bins.BINS, max_group // group))
        return Bandits(walk, windows, gains, jnp.float32(0), jnp.int32(group), chosen(walk, windows, gains),
                       jnp.full(accuracy_bins.BINS, jnp.nan))

    facts = ("tried", "right", "rollouts", "ratios") if by_surrogate else ("tried", "right")
    return Controller(init, propose, observe, facts=facts, knobs=("prompt_ids", "group_sizes"))

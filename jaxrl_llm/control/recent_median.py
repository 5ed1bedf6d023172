"""SPEAR: the baseline of self-imitation, the median of recent group-mean rewards (arXiv 2509.22601)."""
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.maths import masked


class RecentMeans(struct.PyTreeNode):
    """The last means: `values` f32[size], NaN for empty entries; `count` i32, the number of means ever added."""

    values: Array
    count: Array


def record(history: RecentMeans, rewards_PG: Array, valid_PG: Array) -> RecentMeans:
    """The history with the mean reward of every prompt that has valid rollouts; new means replace the oldest.

    Raises ValueError: the batch has more prompts than the history has entries.
    """
    size, prompts = history.values.shape[0], valid_PG.shape[0]
    if prompts > size:
        raise ValueError(f"a history of size={size} cannot take {prompts} prompts at once; enlarge it")
    real = jnp.any(valid_PG, axis=1)
    place = jnp.where(real, (history.count + jnp.cumsum(real, dtype=jnp.int32) - 1) % size, size)
    means = masked.mean(rewards_PG, valid_PG, axis=1).astype(jnp.float32)
    values = history.values.at[place].set(means, mode="drop")
    return RecentMeans(values, history.count + jnp.sum(real, dtype=jnp.int32))


def baseline(history: RecentMeans) -> Array:
    """f32: the median of the history, 0 while it is empty."""
    return jnp.where(history.count > 0, jnp.nanmedian(history.values), 0)


@controller
def recent_median(*, size: int = 10240) -> Controller:
    """`reward_baseline`: the `baseline` of the last `size` means of groups without replayed rollouts. Facts: `rollouts`."""
    return Controller(
        lambda: RecentMeans(jnp.full(size, jnp.nan, jnp.float32), jnp.int32(0)),
        lambda history: {"reward_baseline": baseline(history)},
        lambda history, facts: record(history, facts["rollouts"].rewards, facts["rollouts"].fresh),
        facts=("rollouts",), knobs=("reward_baseline",))

"""Turn control: a limit from the turns that an unrestricted agent uses, announced at every turn (arXiv 2510.16786)."""
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrl_llm.control.base import Controller, controller

UNRESTRICTED = 100


class Calibration(struct.PyTreeNode):
    """`turns` f32[size] of the first trajectories, NaN for empty entries; `count` and `step` i32: trajectories, steps."""

    turns: Array
    count: Array
    step: Array


def limit(turns: Array, percentile: float) -> Array:
    """i32: this percentile of the turns (NaN: none), interpolated linearly, rounded, at least 1."""
    return jnp.maximum(jnp.round(jnp.nanpercentile(turns, percentile)), 1).astype(jnp.int32)


def record(seen: Calibration, turns: Array, valid: Array) -> Calibration:
    """The calibration with the turns of the valid trajectories of one more step, any shape; a surplus is dropped."""
    valid, size = valid.reshape(-1), seen.turns.shape[0]
    place = jnp.where(valid, seen.count + jnp.cumsum(valid, dtype=jnp.int32) - 1, size)
    kept = seen.turns.at[place].set(turns.reshape(-1).astype(jnp.float32), mode="drop")
    return Calibration(kept, jnp.minimum(seen.count + jnp.sum(valid, dtype=jnp.int32), size), seen.step + 1)


@controller
def turn_control(*, first: float = 50.0, last: float = 75.0, steps: int = 10, size: int = 4096) -> Controller:
    """`max_turns` and `announced_turns`: the percentiles `last` and `first` of turns in the first `steps` steps.

    Until then trajectories have `UNRESTRICTED` turns, and none are announced. Then the policy reads after each turn the number
    of turns left, first of the announced ones, then, if it is not done, of all: one extension, without a test. With
    `first=last` the limit is fixed. The limit follows the paper, the extension is reconstructed. Raises ValueError for
    falling percentiles, and without a step or a trajectory to measure.
    """
    if not 0 < first <= last <= 100 or steps < 1 or size < 1:
        raise ValueError(f"first={first}, last={last}, steps={steps}, size={size}; give percentiles 0 < first <= last <= 100, "
                         "and a step and a trajectory at least")

    def propose(seen):
        known = (seen.step >= steps) & (seen.count > 0)
        return {"max_turns": jnp.where(known, limit(seen.turns, last), UNRESTRICTED),
                "announced_turns": jnp.where(known, limit(seen.turns, first), 0)}

    def observe(seen, facts):
        rollouts = facts["rollouts"]
        return record(seen, rollouts.extras["turns"], rollouts.fresh & (seen.step < steps))

    return Controller(lambda: Calibration(jnp.full(size, jnp.nan, jnp.float32), jnp.int32(0), jnp.int32(0)), propose, observe,
                      facts=("rollouts",), knobs=("max_turns", "announced_turns"))

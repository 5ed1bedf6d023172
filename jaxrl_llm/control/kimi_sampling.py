"""Kimi k1.5's choice of problems: from easy to hard grades, then by failure rate (arXiv 2501.12599)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class LevelRecord(NamedTuple):
    """For each of N problems: rollouts so far and right ones among them, i32[N], and its level i32[N]; `step` i32[]."""

    tried: Array
    right: Array
    levels: Array
    step: Array


def by_failure(success_N: Array) -> Array:
    """f32[N], summing to 1: `(1 - s) / sum (1 - s)`; all equal if every s is 1."""
    failure = 1 - success_N
    total = jnp.sum(failure)
    return jnp.where(total > 0, failure / jnp.where(total > 0, total, 1), 1 / failure.size)


@controller
def kimi_sampling(*, every: int = 20) -> Controller:
    """`prompt_weights` f32[N]: `every` steps for each level of the task, the easiest first; then all problems `by_failure`.

    The order of `tasks.loader.levels_of` is from easy to hard. A problem that was never tried counts as failed. Facts: `tried`,
    `right`. The paper gives no numbers. Raises ValueError: fewer than 0 steps.
    """
    if every < 0:
        raise ValueError(f"every={every} steps for a level; give 0 or more")

    def propose(record):
        failure = by_failure(record.right / jnp.maximum(record.tried, 1))
        grade = record.step // max(every, 1)
        graded = (grade <= jnp.max(record.levels)) & (every > 0)
        return {"prompt_weights": jnp.where(graded, (record.levels == grade).astype(jnp.float32), failure)}

    def observe(record, facts):
        return LevelRecord(record.tried + facts["tried"], record.right + facts["right"], record.levels, record.step + 1)

    def init(levels):
        return LevelRecord(*(jnp.zeros(len(levels), jnp.int32),) * 2, jnp.asarray(levels), jnp.int32(0))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_weights",))

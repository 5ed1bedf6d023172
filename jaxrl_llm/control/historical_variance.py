"""One-example training: the example whose accuracy varied most while all were trained on (arXiv 2504.20571)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.maths import masked


class Visits(NamedTuple):
    """For each of N problems, f32[N]: its number of visits, mean and sum of squared deviations of its accuracies.

    `chosen` i32[]: the problem of largest variance from the second phase of a run on, -1 in the first one.
    """

    times: Array
    mean: Array
    squares: Array
    chosen: Array


def visited(visits: Visits, prompt_ids_P: Array, accuracy_P: Array, real_P: Array) -> Visits:
    """The record with one more visit of each prompt where `real`, by Welford's rule; ids outside of it are not counted.

    A prompt that is in the batch several times is visited once, with its mean accuracy.
    """
    ids = jnp.where(real_P & (prompt_ids_P >= 0), prompt_ids_P, visits.times.size)
    def add(x):
        return jnp.zeros_like(visits.mean).at[ids].add(x, mode="drop")
    rows = add(jnp.ones_like(accuracy_P))
    seen = rows > 0
    accuracy, times = add(accuracy_P) / jnp.where(seen, rows, 1), visits.times + seen
    off = jnp.where(seen, accuracy - visits.mean, 0)
    mean = visits.mean + off / jnp.maximum(times, 1)
    return visits._replace(times=times, mean=mean, squares=visits.squares + off * jnp.where(seen, accuracy - mean, 0))


def historical_variances(visits: Visits) -> Array:
    """f32[N]: population variance of each problem's mean accuracy over its visits; 0 without a visit."""
    return visits.squares / jnp.maximum(visits.times, 1)


@controller
def historical_variance() -> Controller:
    """`prompt_weights` f32[N]: equal in the first phase of a run, then 1 for the problem of largest variance in it, else 0.

    Ties go to the first problem. The paper ranks by a run of 500 steps, and begins anew with the chosen problem. `init(N)`.
    Facts: `rollouts`; right answers count, not rewards.
    """

    def propose(visits):
        one = visits.chosen == jnp.arange(visits.times.size)
        return {"prompt_weights": jnp.where(visits.chosen < 0, 1.0, one.astype(jnp.float32))}

    def observe(visits, facts):
        rollouts = facts["rollouts"]
        accuracy = masked.mean(rollouts.correct.astype(jnp.float32), rollouts.fresh, axis=1)
        exploring = visits.chosen < 0  # afterwards the choice is fixed, however its accuracy changes
        return visited(visits, rollouts.prompt_ids, accuracy, jnp.any(rollouts.fresh, axis=1) & exploring)

    def begin(visits):
        best = jnp.argmax(historical_variances(visits)).astype(jnp.int32)
        return visits._replace(chosen=jnp.where(visits.chosen < 0, best, visits.chosen))

    def init(prompts):
        return Visits(jnp.zeros(prompts), jnp.zeros(prompts), jnp.zeros(prompts), jnp.int32(-1))

    return Controller(init, propose, observe, facts=("rollouts",), knobs=("prompt_weights",), begin=begin)

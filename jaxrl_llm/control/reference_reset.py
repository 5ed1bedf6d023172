"""ProRL: when to make the current policy the new reference and clear the optimiser (arXiv 2505.24864; reconstructed).

The paper says only that it resets when validation stagnates or drops; the rule and its numbers are ours.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class Validation(NamedTuple):
    """Scores since the last reset: the best, its age in evaluations, and the last one (-inf: none yet)."""

    best: Array
    age: Array
    last: Array


@controller
def reference_reset(*, patience: int = 3, drop: float = 0.05) -> Controller:
    """`reset` is True when the best score is `patience` evaluations old, or the last is more than `drop` below it.

    Facts: `score` of one evaluation; among equal scores the first counts as the best. The score after a reset is the first
    of a new history.
    """

    def init():
        return Validation(jnp.float32(-jnp.inf), jnp.int32(0), jnp.float32(-jnp.inf))

    def stagnates(state):
        return (state.age >= patience) | (state.last < state.best - drop)

    def observe(state, facts):
        state = jax.tree.map(lambda fresh, old: jnp.where(stagnates(state), fresh, old), init(), state)
        score = jnp.float32(facts["score"])
        better = score > state.best
        return Validation(jnp.where(better, score, state.best), jnp.where(better, 0, state.age + 1), score)

    return Controller(init, lambda state: {"reset": stagnates(state)}, observe, facts=("score",), knobs=("reset",))

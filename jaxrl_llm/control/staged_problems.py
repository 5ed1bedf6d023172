"""Problems that stay from phase to phase of a run, by how the policy solved them in the phase before.

AceReason-Nemotron (arXiv 2505.16400, 2506.13284) trains its last stages on hard problems, TableGPT-R1 (arXiv 2512.20312) later
ones on those that are solved sometimes, and the last on those that are not solved well.
"""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class Kept(NamedTuple):
    """For each of N problems: rollouts of this phase, right ones, i32[N], `kept` bool[N]; `number` of the phase from 0."""

    tried: Array
    right: Array
    kept: Array
    number: Array


def within(tried_N: Array, right_N: Array, low: Array | float, high: Array | float) -> Array:
    """bool[N]: problems with a share of right rollouts from `low` to `high`, and problems that were not tried."""
    return (tried_N == 0) | ((right_N >= low * tried_N - 1e-6) & (right_N <= high * tried_N + 1e-6))


@controller
def staged_problems(*, bands: Sequence[Sequence[float]] = ((0, 1), (0, 1), (0, 6 / 16), (0, 6 / 16))) -> Controller:
    """`prompt_weights`: 1 for the problems of this phase of a run, 0 for all others.

    Phase k has those problems of phase k - 1 whose share of right rollouts there is `within` its band (low, high), where the
    first phase has all, and further ones the last band. The bands of AceReason's stages of 8k, 16k, 24k and 32k tokens are the
    defaults. If no problem is left, all are drawn. Facts: `tried`, `right`. Raises ValueError for shares that are not in order.
    """
    if not bands or any(len(band) != 2 or not 0 <= band[0] <= band[1] <= 1 for band in bands):
        raise ValueError(f"bands={bands}; give the lowest and the highest share of right rollouts for each phase, for example "
                         "((0, 1), (0, 0.375))")
    shares = jnp.asarray(bands, jnp.float32)

    def begin(stage):
        number = stage.number + 1
        low, high = shares[jnp.minimum(number, len(bands) - 1)]
        none = jnp.zeros_like(stage.tried)
        return Kept(none, none, stage.kept & within(stage.tried, stage.right, low, high), number)

    def init(prompts):
        return Kept(jnp.zeros(prompts, jnp.int32), jnp.zeros(prompts, jnp.int32), jnp.ones(prompts, bool), jnp.int32(0))

    return Controller(
        init, lambda stage: {"prompt_weights": stage.kept.astype(jnp.float32)},
        lambda stage, facts: stage._replace(tried=stage.tried + facts["tried"], right=stage.right + facts["right"]),
        facts=("tried", "right"), knobs=("prompt_weights",), begin=begin)

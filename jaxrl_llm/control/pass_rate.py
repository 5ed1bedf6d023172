"""Excluding solved prompts from later batches (ScaleRL, arXiv 2510.13786; RAPO, arXiv 2509.24107)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


def unsolved(pass_rate_P: Array, *, cut: float = 0.9, at_least: int = 0) -> Array:
    """bool[P]: prompts with a pass rate below `cut`, and those never tried (NaN).

    If fewer than `at_least` remain, the hardest solved prompts are added up to that number (ties: the first).
    """
    rate = jnp.where(jnp.isnan(pass_rate_P), -jnp.inf, pass_rate_P)
    rank = jnp.argsort(jnp.argsort(rate, stable=True))
    return (rate < cut) | (rank < at_least)


class PassCounts(NamedTuple):
    """For each of N prompts, f32[N]: rollouts so far, and right ones among them."""

    tried: Array
    solved: Array


@controller
def pass_rate(*, cut: float = 0.9, at_least: int = 0) -> Controller:
    """`prompt_weights` f32[N], 1 for problems that are `unsolved` by the share of right rollouts in the whole history, else 0.

    `init(N)`. Facts: `tried` and `right`, which count groups that a filter drops and not what is replayed.
    """

    def propose(record):
        rate = jnp.where(record.tried > 0, record.solved / jnp.maximum(record.tried, 1), jnp.nan)
        return {"prompt_weights": unsolved(rate, cut=cut, at_least=at_least).astype(jnp.float32)}

    def observe(record, facts):
        return PassCounts(record.tried + facts["tried"], record.solved + facts["right"])

    return Controller(lambda prompts: PassCounts(jnp.zeros(prompts), jnp.zeros(prompts)), propose, observe,
                      facts=("tried", "right"), knobs=("prompt_weights",))

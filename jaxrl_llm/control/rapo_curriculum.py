"""RAPO's curriculum: passes through the problems, each without those that were solved in the one before (arXiv 2509.24107)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class Pass(NamedTuple):
    """Where the walk is, and `kept` bool[N], the problems that are left."""

    walk: passes.Walk
    kept: Array


@controller
def rapo_curriculum(*, cut: float = 0.9) -> Controller:
    """`prompt_ids`, `prompt_weights`: passes through the problems that are left; solved ones never come back.

    Solved is a problem of whose rollouts in a pass a share of at least `cut` is right. In a pass it comes once: that it
    leaves at once, or with the end of the pass, is the same. Right answers count, not rewards: the paper's `R > 0` holds for a
    well-formed wrong answer too. Facts: `tried`, `right`. Where none is left, all problems are drawn.
    """
    def observe(state, facts):
        tried, right = facts["tried"], facts["right"]
        kept = state.kept & ~((tried > 0) & (right >= cut * tried - 1e-6))
        return Pass(passes.advance(state.walk, tried, kept), kept)

    def init(prompts, batch, seed):
        return Pass(passes.start(prompts, batch, seed), jnp.ones(prompts, bool))

    def propose(state):
        return {"prompt_ids": state.walk.ids, "prompt_weights": state.kept.astype(jnp.float32)}

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_ids", "prompt_weights"))

"""RAPO's curriculum: passes through the problems, each without those solved in the previous pass (arXiv 2509.24107)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class RapoState(NamedTuple):
    """State: the walk, and `kept` bool[N], the remaining problems."""

    walk: passes.Walk
    kept: Array


@controller
def rapo_curriculum(*, cut: float = 0.9) -> Controller:
    """`prompt_ids`, `prompt_weights`: passes through the remaining problems; solved problems never return.

    A problem is solved if at least a share `cut` of its rollouts in a pass is right. It comes once in a pass, so it makes no
    difference whether it leaves at once or at the end of the pass. Right answers count, not rewards: the paper's `R > 0` holds
    for a well-formed wrong answer too. Facts: `tried`, `right`. If no problem remains, all problems are drawn.
    """
    def observe(state, facts):
        tried, right = facts["tried"], facts["right"]
        kept = state.kept & ~((tried > 0) & (right >= cut * tried - 1e-6))
        return RapoState(passes.advance(state.walk, tried, kept), kept)

    def init(shares, batch, seed):
        return RapoState(passes.start(shares, batch, seed), jnp.ones(shares.problems, bool))

    def propose(state):
        return {"prompt_ids": state.walk.ids, "prompt_weights": state.kept.astype(jnp.float32)}

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_ids", "prompt_weights"))

"""Rules that decide within a batch how many further rollouts a prompt gets.

To add one, write a keyword-only factory under `@rule` into a file of this folder:

    @rule
    def unsolved(*, extra: int = 8) -> Rule:
        def more(rewards, valid, first, most):
            none = (np.where(valid, rewards, 0) == 0).all(1)
            return np.where(none & (valid.sum(1) == first), extra, 0)

        return Rule(more, solved=True)

A row of the catalogue names it (`Method.allocation`).
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.tools import registry


class Rule(NamedTuple):
    """`more(rewards f32[P, K], valid bool[P, K], first, most) -> i64[P]`, further rollouts for each prompt; all 0: no more.

    `more` is called after every round: first when all prompts have `first` rollouts, then after each round that it requested. A
    prompt gets at most `most`. `first` is `pilot` rollouts, 0: a group. `reads`: facts f32[P] measured on the first round
    (`topologies.base.MEASURED`); `more` takes them by name. `keep(rewards, valid) -> bool[P]`, the prompts of a complete batch
    to train on; None: all. `solved`: both functions read rewards of 1 for rollouts that solve their problem (`Forest.solved`)
    and 0 for others, independent of shaping in the trained rewards. `mean`: average rollouts per prompt as a multiple of
    `first`, if the rule allocates a total; a run is refused if `most` allows no more. `draws`: `more` takes `chance` f64[P] by
    name, a random number of each prompt, uniform in [0, 1) and the same in all rounds of a batch.
    """

    more: Callable[..., np.ndarray]
    keep: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    reads: tuple[str, ...] = ()
    solved: bool = False
    mean: float = 1.0
    pilot: int = 0
    draws: bool = False


RULES = registry.PartTable("allocation rule", Rule)
rule = RULES.enter


def success(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """f64[P], the share of each prompt's rollouts that solve it, from rewards of 0 and 1; 0 without rollouts."""
    return np.sum(rewards, axis=1, where=valid, dtype=np.float64) / np.maximum(valid.sum(1), 1)

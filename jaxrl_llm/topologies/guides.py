"""The part of a problem's solution that completions begin with: experts in a group (LUFFY), hints by difficulty (ADHint).

To add one, write a keyword-only factory under `@guide`; a row of the catalogue names it (`Method.guidance`).
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.control.hint_share import hint_ratio
from jaxrl_llm.tools import registry


class Guide(NamedTuple):
    """Shares of the solution that completions begin with, from 0 (the policy alone) to 1 (all of it with the end token).

    `first(n) -> f32[n]`: the share of each of the n completions that a prompt gets first. `second(rewards f32[P, K], valid
    bool[P, K], normal f32[P]) -> f32[P]`: the share of all completions of each prompt's last group, from the results of those
    before and one standard normal number each; None: there is no last group.
    """

    first: Callable[[int], np.ndarray]
    second: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None

    def shares(self, n: int) -> np.ndarray:
        """f32[n] of `first`, which may return a list; ValueError for what are no n shares."""
        return _shares("first", self.first(n), n)

    def last_shares(self, rewards: np.ndarray, valid: np.ndarray, normal: np.ndarray) -> np.ndarray:
        """f32[P] of `second`, which may return a list; ValueError for what are no P shares."""
        assert self.second is not None
        return _shares("second", self.second(rewards, valid, normal), len(normal))


def _shares(what: str, given: Any, count: int) -> np.ndarray:
    """The shares that a function of a guide returned, f32[count]."""
    try:
        shares = np.asarray(given, np.float32)
    except (TypeError, ValueError):
        shares = np.zeros(0)
    if shares.shape != (count,) or ((shares < 0) | (shares > 1)).any():
        raise ValueError(f"{what!r} of the guide returned {given!r}; return {count} shares of a solution, each from 0 to 1, as "
                         "an array or a list")
    return shares


GUIDES = registry.PartTable("guide", Guide)
guide = GUIDES.enter


@guide
def experts(*, traces: int = 1, share: float = 1.0) -> Guide:
    """`traces` completions of each prompt begin with this share of the solution, by default all of it (arXiv 2504.14945).

    Raises ValueError: no trace, or a share outside (0, 1].
    """
    if traces < 1 or not 0 < share <= 1:
        raise ValueError(f"traces={traces} of an expert's text, share={share}; give 1 or more and a share from 0 to 1")

    return Guide(lambda n: np.where(np.arange(n) < traces, share, 0).astype(np.float32))


@guide
def adhint(*, low: float = 0.0, high: float = 0.8, noise: float = 0.05) -> Guide:
    """A group without hints, then one with hints whose length follows the first group's difficulty, see `control.hint_ratio`.

    `noise`: standard deviation of the noise added to the share (arXiv 2512.13095; the numbers are ours). Raises ValueError:
    shares outside [0, 1), or in the wrong order.
    """
    if not 0 <= low <= high < 1:
        raise ValueError(f"hints from low={low} to high={high} of a solution; give 0 <= low <= high < 1")

    def second(rewards, valid, normal):
        return np.asarray(hint_ratio(np.clip(rewards, 0, 1), valid, np.float32(noise) * normal, low=low, high=high))

    return Guide(lambda n: np.zeros(n, np.float32), second)

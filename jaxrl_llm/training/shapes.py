"""The few shapes that a run compiles for, and which of them holds a batch.

They follow from the limits of a run alone, so that a resumed run finds the ones that it had.
"""
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.unpadding import through_last

MAX_PROGRAMS = 8  # of updates, and as many of scoring
QUARTERS = 4  # of the slots of a batch that may be filled, see `Rollouts.filled`; also the most sizes of one kind


class Ladders(NamedTuple):
    """The sizes that a batch may be padded to, from the least to the limit of each kind.

    prompt_tokens, tokens: S and T.
    rounds: rows of a batch, in units of its P prompts; 1 where groups are not cut.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[int, ...]

    @property
    def shapes(self) -> int:
        """How many shapes of batches there are."""
        return math.prod(map(len, self))


@functools.cache
def ladders(prompt_tokens: int, tokens: int, group: int, rounds: int, most: int) -> Ladders:
    """Of all ladders with at most `most` shapes those that pad least, `rounds (S + G T)` slots, were all sizes equally likely.

    `prompt_tokens`, `tokens` and `rounds` are the limits of a batch of groups of `group`.
    """
    counts = itertools.product(range(1, QUARTERS + 1), repeat=3)
    found = [Ladders(prompt_buckets(prompt_tokens, s), buckets(tokens, t), buckets(rounds, r)) for s, t, r in counts]

    def slots(one: Ladders) -> float:
        return mean_rung(one.rounds) * (mean_rung(one.prompt_tokens) + group * mean_rung(one.tokens))

    return min((one for one in found if one.shapes <= most), key=lambda one: (slots(one), one.shapes))


def buckets(limit: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """At most `count` sizes, equal parts of the limit in multiples of a number."""
    return tuple(sorted({min(limit, -(-limit * part // (count * multiple)) * multiple) for part in range(1, count + 1)}))


def prompt_buckets(longest: int, count: int = QUARTERS) -> tuple[int, ...]:
    """Lengths of prompts in multiples of 64; quarters of the longest are those that prompts are sampled in."""
    return buckets(longest, count, 64)


def smallest(ladder: Sequence[int], need: int) -> int:
    """The first of the sizes that holds `need`."""
    return next(size for size in ladder if size >= need)


def mean_rung(ladder: Sequence[int]) -> float:
    """The mean of `smallest` for needs that are equally likely from 1 to the last of the sizes."""
    return sum((size - below) * size for below, size in zip((0, *ladder), ladder)) / ladder[-1]


def row_lengths(prompt_tokens: int, tokens: int, group: int) -> tuple[int, ...]:
    """At most four lengths of packed rows. The longest holds a prompt with one completion, or with more, up to its whole group.

    It holds so many that rows which all go on from the prompt compute it again for at most a quarter of the slots of a group.
    """
    def slots(completions):
        return -(-group // completions) * (prompt_tokens + completions * tokens)
    held = next(n for n in range(1, group + 1) if 4 * slots(n) <= 5 * slots(group))
    return prompt_buckets(prompt_tokens + held * tokens)


def quarters_filled(mask: np.ndarray, prompts: int) -> int:
    """Smallest n of 1 to 4 such that of no `prompts` prompts more than n quarters of the slots `[prompts, G, T]` are filled.

    `mask bool[P, G, T]`. What holds for parts of so many prompts holds for all larger ones, in any order.
    """
    fullest = np.sort(through_last(mask).sum((1, 2)))[::-1][:prompts].sum()
    return max(1, int(-(-4 * fullest // (prompts * mask[0].size))))

"""The few shapes that a run compiles for, and which of them holds a batch.

They follow from the limits of a run alone, so that a resumed run finds the ones that it had.
"""
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.unpadding import through_last

MAX_PROGRAMS = 8  # of updates, and as many of log-probs
QUARTERS = 4  # of the slots of a batch that may be filled, see `Rollouts.filled`; also the most sizes of one kind


class Ladders(NamedTuple):
    """The sizes that a batch may be padded to, from the least to the limit of each kind.

    prompt_tokens, tokens: S and T.
    groups: of each prompt, a row of a batch each; 1 where groups are not cut.
    filled: for each T, the least quarters of its slots that are computed, see `Rollouts.filled`; 4 where padding is computed.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    groups: tuple[int, ...]
    filled: tuple[int, ...]

    @property
    def programs(self) -> int:
        """Programs of one kind that such batches need."""
        return len(self.prompt_tokens) * len(self.groups) * sum(QUARTERS + 1 - least for least in self.filled)

    def filled_of(self, tokens: int) -> int:
        """The least quarters of a batch of this T."""
        return self.filled[self.tokens.index(smallest(self.tokens, tokens))]


def limits(prompt_tokens: int, tokens: int, group: int, groups: int) -> Ladders:
    """One shape, for what is computed in packed rows."""
    return Ladders((prompt_tokens,), (tokens,), (groups,), (QUARTERS,))


@functools.cache
def padded(prompt_tokens: int, tokens: int, group: int, groups: int) -> Ladders:
    """Ladders for batches `[groups P, group, tokens]` whose padding is computed: equal parts of each limit."""
    lengths = [buckets(tokens, count) for count in range(1, QUARTERS + 1)]
    return _best(prompt_tokens, [(one, (QUARTERS,) * len(one)) for one in lengths], group, groups)


@functools.cache
def unpadded(prompt_tokens: int, tokens: int, group: int, groups: int) -> Ladders:
    """Ladders for batches whose padding is left out of matrix products.

    At the limit of T, where most batches are, all quarters may be filled. Shorter ones spare attention; they are halves of each
    other, and what fills less than three quarters of one mostly fits the next. Where groups are cut, numbers of rows go first:
    they spare attention and prompts.
    """
    lengths = [tuple(sorted({-(-tokens // 2**n) for n in range(count)})) for count in ((1, 2, 3) if groups == 1 else (1,))]
    return _best(prompt_tokens, [(one, (QUARTERS - 1,) * (len(one) - 1) + (1,)) for one in lengths], group, groups)


def _best(prompt_tokens: int, lengths, group: int, groups: int) -> Ladders:
    """The ladders of few programs that have the fewest slots, `groups (S + G T)`, were all sizes up to the limits as likely."""
    counts = range(1, QUARTERS + 1)
    found = [Ladders(prompt_buckets(prompt_tokens, s), tokens, buckets(groups, g), filled)
             for s, (tokens, filled), g in itertools.product(counts, lengths, counts)]

    def slots(one: Ladders) -> float:
        return mean_rung(one.groups) * (mean_rung(one.prompt_tokens) + group * mean_rung(one.tokens))

    return min((one for one in found if one.programs <= MAX_PROGRAMS), key=lambda one: (slots(one), one.programs))


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


def row_lengths(prompt_tokens: int, tokens: int, group: int, multiple: int = 1) -> tuple[int, ...]:
    """At most four lengths of packed rows, multiples of `multiple`.

    The longest holds a prompt with one completion, or with more, up to its whole group. Rows that all go on from the prompt
    compute it again for at most a quarter of the slots of a group.
    """
    def slots(completions):
        return -(-group // completions) * (prompt_tokens + completions * tokens)
    held = next(n for n in range(1, group + 1) if 4 * slots(n) <= 5 * slots(group))
    return tuple(dict.fromkeys(-(-n // multiple) * multiple for n in prompt_buckets(prompt_tokens + held * tokens)))


def quarters_filled(mask: np.ndarray, prompts: int) -> int:
    """Smallest n of 1 to 4 such that of no `prompts` prompts more than n quarters of the slots `[prompts, G, T]` are filled.

    `mask bool[P, G, T]`. What holds for parts of this number of prompts holds for all larger ones, in any order.
    """
    fullest = np.sort(through_last(mask).sum((1, 2)))[::-1][:prompts].sum()
    return max(1, int(-(-4 * fullest // (prompts * mask[0].size))))

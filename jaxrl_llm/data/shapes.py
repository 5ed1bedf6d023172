"""The few shapes that a run compiles for, and the choice of one for a batch.

They follow only from the limits of a run, so that a resumed run has the same ones.
"""
import functools
import itertools
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.ladders import QUARTERS, buckets, mean_rung, prompt_buckets, smallest
from jaxrl_llm.models.unpadding import through_last

MAX_PROGRAMS = 8  # of updates, a critic's included unless rows are packed, and the same number of log-probs


class Ladders(NamedTuple):
    """The sizes that a batch may be padded to, from the smallest to the limit of each kind.

    prompt_tokens, tokens: S and T.
    groups: numbers of groups per prompt, each a row of a batch; 1 if groups are not cut.
    filled: for each T, the minimum quarters of its slots that are computed, see `Rollouts.filled`; 4 if padding is computed.
    rows: lengths of packed rows; empty: those of `row_lengths`.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    groups: tuple[int, ...]
    filled: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @property
    def programs(self) -> int:
        """Number of programs of one kind for these batches."""
        return len(self.prompt_tokens) * len(self.groups) * sum(QUARTERS + 1 - least for least in self.filled)

    def filled_of(self, tokens: int) -> int:
        """The minimum filled quarters of a batch of this T."""
        return self.filled[self.tokens.index(smallest(self.tokens, tokens))]


def limits(prompt_tokens: int, tokens: int, group: int, groups: int, most: int = MAX_PROGRAMS) -> Ladders:
    """A single shape, for batches that are computed in packed rows."""
    return Ladders((prompt_tokens,), (tokens,), (groups,), (QUARTERS,))


@functools.cache
def padded(prompt_tokens: int, tokens: int, group: int, groups: int, most: int = MAX_PROGRAMS) -> Ladders:
    """Ladders of at most `most` programs for batches `[groups P, group, tokens]` with their padding: equal parts of limits."""
    lengths = [buckets(tokens, count) for count in range(1, QUARTERS + 1)]
    return _best(prompt_tokens, [(one, (QUARTERS,) * len(one)) for one in lengths], group, groups, most)


@functools.cache
def unpadded(prompt_tokens: int, tokens: int, group: int, groups: int, most: int = MAX_PROGRAMS) -> Ladders:
    """Ladders of at most `most` programs for batches whose padding is skipped in matrix products.

    At the limit of T, where most batches are, any number of quarters may be filled. Shorter sizes save attention; each is half
    of the next, and a batch that fills less than three quarters of one mostly fits the next smaller one. If groups are cut,
    sizes for numbers of rows have priority: they save attention and prompts.
    """
    lengths = [tuple(sorted({-(-tokens // 2**n) for n in range(count)})) for count in ((1, 2, 3) if groups == 1 else (1,))]
    return _best(prompt_tokens, [(one, (QUARTERS - 1,) * (len(one) - 1) + (1,)) for one in lengths], group, groups, most)


def _best(prompt_tokens: int, lengths, group: int, groups: int, most: int) -> Ladders:
    """The ladders of at most `most` programs with the fewest mean slots, `groups (S + G T)`; all sizes are equally likely."""
    counts = range(1, QUARTERS + 1)
    choices = [Ladders(prompt_buckets(prompt_tokens, s), tokens, buckets(groups, g), filled)
               for s, (tokens, filled), g in itertools.product(counts, lengths, counts)]

    def slots(one: Ladders) -> float:
        return mean_rung(one.groups) * (mean_rung(one.prompt_tokens) + group * mean_rung(one.tokens))

    return min((one for one in choices if one.programs <= most), key=lambda one: (slots(one), one.programs))


def row_lengths(prompt_tokens: int, tokens: int, group: int, multiple: int = 1) -> tuple[int, ...]:
    """At most three lengths of packed rows, multiples of `multiple`; each has two programs of updates.

    The longest holds a prompt with one or more completions, up to its whole group. Repeating the prompt in the rows of a group
    adds at most a tenth to the group's slots.
    """
    def slots(completions):
        return -(-group // completions) * (prompt_tokens + completions * tokens)
    held = next(n for n in range(1, group + 1) if 10 * slots(n) <= 11 * slots(group))
    return tuple(dict.fromkeys(-(-n // multiple) * multiple for n in prompt_buckets(prompt_tokens + held * tokens, 3)))


def quarters_filled(mask: np.ndarray, prompts: int) -> int:
    """Smallest n of 1 to 4 such that any `prompts` prompts fill at most n quarters of their slots `[prompts, G, T]`.

    `mask bool[P, G, T]`. A bound for parts of this number of prompts also holds for larger parts, in any order.
    """
    fullest = np.sort(through_last(mask).sum((1, 2)))[::-1][:prompts].sum()
    return max(1, int(-(-4 * fullest // (prompts * mask[0].size))))

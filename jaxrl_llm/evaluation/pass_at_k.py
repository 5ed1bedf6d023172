"""Results of k tries: unbiased pass@k (arXiv 2107.03374) and the expected majority vote of k (maj@k), from n samples.

Both read one problem's n samples as counts, so that samples can come in any number of batches and need not be kept.
"""
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import comb, gammaln

# Binomials of more samples than this overflow float64, in which the votes are counted.
MOST_VOTES = 1024


def pass_at_k(samples: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """`1 - C(n - c, k) / C(n, k)` per problem: the chance that k of its n samples, c of them right, hold a right one.

    `samples`, `correct`: i[Q]. Computed in logarithms, for any n. NaN where k > n, so that a mean cannot hide it. Raises
    ValueError for k < 1 and impossible counts.
    """
    n, c = np.broadcast_arrays(np.asarray(samples, np.float64), np.asarray(correct, np.float64))
    if k < 1 or (c < 0).any() or (c > n).any():
        raise ValueError(f"pass@{k} of problems with 0 <= correct <= samples and k >= 1 only")
    if k == 1:  # avg@n, without rounding
        return c / np.where(n > 0, n, np.nan)
    misses = n - c
    possible = misses >= k
    left = np.where(possible, misses, k)  # where more are drawn than there are misses, a hit is sure
    log_share = (gammaln(left + 1) - gammaln(left - k + 1)) - (gammaln(n + 1) - gammaln(np.maximum(n - k, 0) + 1))
    chance = np.where(possible, -np.expm1(np.minimum(log_share, 0)), 1.0)
    return np.where(c == 0, 0.0, chance) + np.where(n < k, np.nan, 0.0)


class Votes(NamedTuple):
    """Counts of one problem's answers: the right one, each wrong one, and samples without an answer."""

    right: int
    wrong: tuple[int, ...]
    none: int

    @property
    def samples(self) -> int:
        return self.right + sum(self.wrong) + self.none


def count_votes(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> Votes:
    """Votes of samples from which a verifier read these `answers` and judged them `correct`. None is no vote.

    All correct samples vote for one right answer, in whatever spelling.
    """
    right = sum(1 for answer, good in zip(answers, correct) if good)
    wrong = Counter(answer for answer, good in zip(answers, correct) if not good and answer is not None)
    return Votes(right, tuple(sorted(wrong.values())), len(answers) - right - wrong.total())


def majority_at_k(votes: Votes, k: int) -> float:
    """Chance that the most frequent answer of k of the samples is the right one, ties broken by lot: exact, over all subsets.

    With k = n it is cons@n. A subset without any answer is wrong. NaN where k > n. With g right votes, the subsets in which
    no wrong answer has more, weighted by 1 / (1 + number of ties), are the coefficient of x^(k-g) in
    `(1 + x)^none  int_0^1 prod_w (sum_{j<g} C(w, j) x^j + y C(w, g) x^g) dy`; answers with w < g join the none.
    """
    n = votes.samples
    if n > MOST_VOTES:
        raise ValueError(f"a vote of {n} samples; at most {MOST_VOTES} are counted exactly")
    if k < 1 or k > n:
        return float("nan")
    if not votes.right:
        return 0.0
    if k == n:
        top = max(votes.wrong, default=0)
        return 0.0 if top > votes.right else 1 / (1 + votes.wrong.count(votes.right))
    return sum(comb(votes.right, g) / comb(n, k) * _won_by(votes, g, k - g) for g in range(1, min(votes.right, k) + 1))


def _won_by(votes: Votes, g: int, rest: int) -> float:
    """The coefficient: ways to draw `rest` other samples beside g right ones with no wrong answer above g, ties weighted."""
    rivals = Counter(size for size in votes.wrong if size >= g)
    harmless = votes.samples - votes.right - sum(size * times for size, times in rivals.items())
    nodes, weights = np.polynomial.legendre.leggauss(rivals.total() // 2 + 1)  # exact to the degree of y
    table = np.tile(comb(harmless, np.arange(min(harmless, rest) + 1)), (len(nodes), 1))
    for size, times in rivals.items():
        factor = np.tile(comb(size, np.arange(min(g, rest) + 1)), (len(nodes), 1))
        if g <= rest:
            factor[:, g] *= (nodes + 1) / 2
        for _ in range(times):
            table = _product(table, factor, rest)
    return float(weights / 2 @ table[:, rest]) if table.shape[1] > rest else 0.0


def _product(a: np.ndarray, b: np.ndarray, degree: int) -> np.ndarray:
    """Rows of coefficients multiplied as polynomials, up to x^degree."""
    size = min(a.shape[1] + b.shape[1] - 1, degree + 1)
    out = np.zeros((len(a), size))
    for j in range(b.shape[1]):
        stretch = min(a.shape[1], size - j)
        if stretch > 0:
            out[:, j:j + stretch] += a[:, :stretch] * b[:, j:j + 1]
    return out


class Boundary(NamedTuple):
    """Problems that two models can reach, solved at least once in all samples (arXiv 2510.11653)."""

    expansion: int
    shrinkage: int
    preserved: int
    consolidated: int


def boundary(base: np.ndarray, new: np.ndarray) -> Boundary:
    """Counts from the shares of right samples `[Q]` of two models.

    They are problems reached by `new` alone, by `base` alone, by both, and of the latter those that `new` solves more often.
    """
    before, after = np.asarray(base) > 0, np.asarray(new) > 0
    both = before & after
    return Boundary(int((after & ~before).sum()), int((before & ~after).sum()), int(both.sum()),
                    int((both & (np.asarray(new) > np.asarray(base))).sum()))

"""Two policies on the same problems, or two methods with the same seeds: the difference, its interval and a test."""
import itertools
from typing import NamedTuple

import numpy as np


class Difference(NamedTuple):
    """Mean of `a - b` over pairs, its 95% bootstrap interval, and the two-sided p-value of "the sign is a coin flip"."""

    mean: float
    low: float
    high: float
    p_value: float


def paired_difference(a: np.ndarray, b: np.ndarray, *, resamples: int = 2000, flips: int = 10_000, seed: int = 0) -> Difference:
    """Compares scores `a [N]` and `b [N]` whose rows are paired.

    The interval resamples pairs. The test flips the signs of the differences (Fisher's randomisation test): all 2^N ways up to
    N = 13, else `flips` random ones, counted as (1 + hits) / (1 + flips). The smallest p-value of N pairs is 2^(1-N). Raises
    ValueError: the two have different lengths, or none.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired scores have one shape [N], N > 0; these have {list(a.shape)} and {list(b.shape)}")
    difference, random = a - b, np.random.default_rng(seed)
    draws = difference[random.integers(len(a), size=(resamples, len(a)))].mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    exact = len(a) <= 13
    signs = (np.array(list(itertools.product((1, -1), repeat=len(a)))) if exact
             else random.choice((1, -1), size=(flips, len(a))))
    slack = 1e-12 * np.abs(difference).sum()  # sums of the same numbers in another order are equal
    hits = np.abs(signs @ difference) >= abs(difference.sum()) - slack
    p_value = hits.mean() if exact else (1 + hits.sum()) / (1 + flips)
    return Difference(float(difference.mean()), float(low), float(high), float(p_value))

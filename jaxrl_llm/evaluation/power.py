"""What a number of seeds can show, before any of them has run: the power of a paired test."""
import math

import numpy as np
from scipy import optimize, stats


def power(difference: float, deviation: float, pairs: int, level: float = 0.05) -> float:
    """Chance that a two-sided paired t-test at `level` on `pairs` pairs of seeds detects a mean difference.

    `deviation`: standard deviation of the paired differences, which are normal: 1 - F(t) + F(-t) of the noncentral t
    distribution with pairs - 1 degrees of freedom at difference sqrt(pairs) / deviation, t the test's threshold.
    """
    _check(deviation, pairs)
    freedom, shift = pairs - 1, abs(difference) * math.sqrt(pairs) / deviation
    threshold = stats.t.ppf(1 - level / 2, freedom)
    wrong_side = np.nan_to_num(stats.nct.cdf(-threshold, freedom, shift))  # scipy has NaN where it is too small to compute
    return float(stats.nct.sf(threshold, freedom, shift) + wrong_side)


def smallest_difference(deviation: float, pairs: int, *, level: float = 0.05, chance: float = 0.8) -> float:
    """The mean difference that `pairs` pairs of seeds detect with this chance, in the unit of `deviation`, see `power`.

    Raises ValueError: fewer than two pairs, or a deviation that is not above 0.
    """
    _check(deviation, pairs)
    return float(deviation * optimize.brentq(lambda shift: power(shift, 1.0, pairs, level) - chance, 1e-6, 100.0))


def paired_deviation(scores: np.ndarray) -> float:
    """Standard deviation of paired differences, pooled over all pairs of methods.

    `scores f64[methods, seeds]`: the seeds are shared. Pooled: sqrt of the mean of the variances. Raises ValueError: fewer than
    two methods or two seeds.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or min(scores.shape) < 2:
        raise ValueError(f"scores of at least 2 methods with at least 2 shared seeds are needed, got {list(scores.shape)}")
    first, second = np.triu_indices(len(scores), 1)
    return float(np.sqrt((scores[first] - scores[second]).var(axis=1, ddof=1).mean()))


def _check(deviation: float, pairs: int) -> None:
    if pairs < 2 or not deviation > 0:
        raise ValueError(f"pairs={pairs}, deviation={deviation}; a spread needs 2 pairs, and it is above 0")

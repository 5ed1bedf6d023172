"""Success rates far below 1/n: sample until a problem is solved r times, and fit how the rate grows (arXiv 2310.03262)."""
from typing import NamedTuple

import numpy as np
from scipy import stats

from jaxrl_llm.evaluation.intervals import Proportion, clopper_pearson


def pass_until(tries: int, successes: int, wanted: int = 2, *, unbiased: bool = False) -> float:
    """Success rate of a problem that took `tries` samples to its `wanted`-th success, or was given up with fewer successes.

    `r / K`, the maximum-likelihood estimate, which is biased upwards; or `(r - 1) / (K - 1)`, which is unbiased (r >= 2). For a
    problem that was given up it is `successes / tries` in both cases.

    Raises:
      ValueError: impossible counts, or `unbiased` with wanted = 1.
    """
    if not 0 <= successes <= min(wanted, tries) or tries < 1:
        raise ValueError(f"{successes} successes of {wanted} in {tries} tries cannot be; sampling stops at the last one wanted")
    if unbiased and wanted < 2:
        raise ValueError("the unbiased form needs at least two successes: wanted=2")
    if successes < wanted or not unbiased:
        return successes / tries
    return (wanted - 1) / (tries - 1)


def pass_until_interval(tries: int, successes: int, wanted: int = 2, level: float = 0.95) -> Proportion:
    """The exact interval of an inverse binomial sample; of a plain binomial one if the problem was given up.

    With a = (1 - level) / 2 the bounds solve `Pr[Bin(K, p) >= r] = a` and `Pr[Bin(K - 1, p) < r] = a`.
    """
    rate = pass_until(tries, successes, wanted)
    if successes < wanted:
        return clopper_pearson(successes, tries, level)
    tail = (1 - level) / 2
    low = stats.beta.ppf(tail, wanted, tries - wanted + 1)
    high = stats.beta.ppf(1 - tail, wanted, tries - wanted) if tries > wanted else 1.0
    return Proportion(rate, float(low), float(high))


class TaskLaw(NamedTuple):
    """`PU(N) = exp(-c N^-alpha)`; `bend`: second differences of `F = log(-log PU)` against log N.

    The law holds where F is straight. Negative bends (concave) mean faster improvement than the law, positive ones slower.
    """

    c: float
    alpha: float
    bend: np.ndarray

    def predict(self, size: np.ndarray) -> np.ndarray:
        """PU of models with `size` parameters."""
        return np.exp(-self.c * np.asarray(size, np.float64) ** -self.alpha)


def fit_task_law(sizes: np.ndarray, rates: np.ndarray) -> TaskLaw:
    """Least squares of log(-log PU) on log N.

    Raises:
      ValueError: fewer than two models, or a rate that is not between 0 and 1.
    """
    sizes, rates = np.asarray(sizes, np.float64), np.asarray(rates, np.float64)
    if len(sizes) < 2 or not ((rates > 0) & (rates < 1)).all():
        raise ValueError(f"the law needs at least two models with success rates between 0 and 1; these are {rates.tolist()}. "
                         "Sample longer where the rate is 0")
    order = np.argsort(sizes)
    x, f = np.log(sizes[order]), np.log(-np.log(rates[order]))
    slope, intercept = np.polyfit(x, f, 1)
    return TaskLaw(float(np.exp(intercept)), float(-slope), np.diff(np.diff(f) / np.diff(x)))

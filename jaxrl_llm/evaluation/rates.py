"""Means over problems with an interval that respects that completions of one problem are not independent."""
from typing import NamedTuple

import numpy as np

from jaxrl_llm.evaluation.pass_at_k import pass_at_k as pass_at_k_of_counts


class Rate(NamedTuple):
    """A mean and its 95% bootstrap interval over problems."""

    mean: float
    low: float
    high: float


def bootstrap_mean(scores: np.ndarray, seed: int = 0, resamples: int = 2000) -> Rate:
    """Mean of `scores [problems, samples]` with a percentile bootstrap over problems: a problem's samples stay together."""
    per_problem = np.asarray(scores, np.float64).mean(axis=1)
    draws = np.random.default_rng(seed).integers(len(per_problem), size=(resamples, len(per_problem)))
    low, high = np.percentile(per_problem[draws].mean(axis=1), [2.5, 97.5])
    return Rate(float(per_problem.mean()), float(low), float(high))


def pass_at_k(solved: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k samples is right, 1 - C(n-c, k)/C(n, k), averaged over problems (arXiv 2107.03374).

    Raises ValueError when k exceeds n, the number of columns of `solved bool[problems, n]`.
    """
    n = solved.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem; there are {n}")
    return float(pass_at_k_of_counts(n, solved.sum(axis=1), k).mean())

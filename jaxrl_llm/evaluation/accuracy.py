"""Accuracy with an interval that respects that completions of one problem are not independent."""
from typing import NamedTuple

import numpy as np

from jaxrl_llm.evaluation.pass_at_k import pass_at_k as pass_at_k_of_counts


class Accuracy(NamedTuple):
    """Mean score and its 95% bootstrap interval over problems."""

    mean: float
    low: float
    high: float


def bootstrap_mean(scores: np.ndarray, seed: int = 0, resamples: int = 2000) -> Accuracy:
    """Mean of `scores [problems, samples]` with a percentile bootstrap over problems: a problem's samples stay together."""
    per_problem = np.asarray(scores, np.float64).mean(axis=1)
    draws = np.random.default_rng(seed).integers(len(per_problem), size=(resamples, len(per_problem)))
    low, high = np.percentile(per_problem[draws].mean(axis=1), [2.5, 97.5])
    return Accuracy(float(per_problem.mean()), float(low), float(high))


def pass_at_k(scores: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k samples is right, 1 - C(n-c, k)/C(n, k), averaged over problems (arXiv 2107.03374).

    `scores [problems, n]` counts as right where positive; raises ValueError when k exceeds n.
    """
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem; there are {n}")
    return float(pass_at_k_of_counts(n, (scores > 0).sum(axis=1), k).mean())

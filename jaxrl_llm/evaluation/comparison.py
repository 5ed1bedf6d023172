"""Statistics of few runs (arXiv 2108.13264, 2402.03046): interquartile means, bootstrap over seeds, equal budgets."""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Interval(NamedTuple):
    """An estimate and its interval; numbers, or arrays of one shape."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def iqm(scores: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Interquartile mean: the mean without the floor(n/4) lowest and highest of n values; of all values without `axis`.

    For up to three values it is their mean.
    """
    scores = np.asarray(scores, np.float64)
    scores = np.sort(scores.reshape(-1) if axis is None else np.moveaxis(scores, axis, 0), axis=0)
    cut = len(scores) // 4
    return scores[cut:len(scores) - cut].mean(axis=0)


def probability_of_improvement(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> float:
    """Mean over tasks of the share of run pairs in which X beats Y, ties counted half: Mann-Whitney's U / (n m).

    `x`, `y`: for each task the scores `[n]` and `[m]` of its runs.
    """
    if len(x) != len(y):
        raise ValueError(f"X has scores of {len(x)} tasks and Y of {len(y)}; give both for the same tasks")
    shares = []
    for one, other in zip(x, y):
        difference = np.subtract.outer(np.asarray(one, np.float64), np.asarray(other, np.float64))
        shares.append(np.where(np.isnan(difference), np.nan, 0.5 + 0.5 * np.sign(difference)).mean())
    return float(np.mean(shares))


def stratified_bootstrap(statistic: Callable[[list[np.ndarray]], ArrayLike], strata: Sequence[np.ndarray], *,
                         resamples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """`statistic(strata)` with its percentile interval; the rows of each stratum are resampled apart from the others.

    A stratum `[S, ...]` holds the S runs of one method on one task: a number each, a whole curve each, or a pair of
    methods that share the seed.
    """
    strata, random = [np.asarray(rows, np.float64) for rows in strata], np.random.default_rng(seed)
    draws = [statistic([rows[random.integers(len(rows), size=len(rows))] for rows in strata]) for _ in range(resamples)]
    return _between_percentiles(np.asarray(statistic(strata)), np.asarray(draws), level)


def _between_percentiles(value: np.ndarray, draws: np.ndarray, level: float) -> Interval:
    """A statistic with the percentile interval of its bootstrap `draws [resamples, ...]`."""
    return Interval(value, *np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0))


def mean_over_runs(scores: np.ndarray, *, resamples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """Interquartile mean over the runs of `scores [S, ...]` and its bootstrap interval at each point.

    The draws are those of `stratified_bootstrap`, all of them in one array.
    """
    scores, random = np.asarray(scores, np.float64), np.random.default_rng(seed)
    draws = iqm(scores[random.integers(len(scores), size=(resamples, len(scores)))], axis=1)
    return _between_percentiles(iqm(scores, axis=0), draws, level)


def improvement(x: np.ndarray, y: np.ndarray, **options) -> Interval:
    """Probability that a run of X `[n]` beats a run of Y `[m]` on one task, with its interval."""
    return stratified_bootstrap(lambda strata: probability_of_improvement(strata[:1], strata[1:]), [x, y], **options)


def at_budget(spent: np.ndarray, scores: np.ndarray, budget: np.ndarray | float) -> np.ndarray:
    """Linear interpolation of the evaluations `scores [N]`, made after `spent [N]`, at `budget`; NaN beyond the last one."""
    finite = np.isfinite(scores)
    if not finite.any():
        return np.full(np.shape(budget), np.nan)
    return np.interp(budget, np.asarray(spent)[finite], np.asarray(scores)[finite], right=np.nan)


def best_within(spent: np.ndarray, scores: np.ndarray, budget: float) -> float:
    """The best evaluation made within `budget`. The maximum of noisy numbers: read it beside the final one."""
    inside = np.asarray(scores, np.float64)[np.asarray(spent) <= budget]
    return float(np.nanmax(inside)) if np.isfinite(inside).any() else float("nan")


def mean_within(spent: np.ndarray, scores: np.ndarray, budget: float) -> float:
    """Height of the curve between 0 and `budget` on average: its area over the budget. NaN if it ends before."""
    spent, scores = np.asarray(spent, np.float64), np.asarray(scores, np.float64)
    inside = np.isfinite(scores) & (spent < budget)
    x = np.append(spent[inside], budget)
    y = np.append(scores[inside], at_budget(spent, scores, np.float64(budget)))
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float("nan")


def budget_to_reach(spent: np.ndarray, scores: np.ndarray, target: float) -> float:
    """The budget at which the curve first crossed `target` (linear between evaluations); infinity if it never did."""
    finite = np.isfinite(scores)
    spent, scores = np.asarray(spent, np.float64)[finite], np.asarray(scores, np.float64)[finite]
    above = np.flatnonzero(scores >= target)
    if not len(above):
        return float("inf")
    after = above[0]
    if after == 0:
        return float(spent[0])
    share = (target - scores[after - 1]) / (scores[after] - scores[after - 1])
    return float(spent[after - 1] + share * (spent[after] - spent[after - 1]))


def choose(tuning: ArrayLike) -> int:
    """Row of the best configuration of `tuning [configurations, seeds]`: highest mean over the tuning seeds.

    A configuration with a failed run (NaN) is never chosen; ValueError if all have one.
    """
    means = np.asarray(tuning, np.float64).mean(axis=1)
    if np.isnan(means).all():
        raise ValueError("every configuration of the grid has a run without a result; look into their log.txt")
    return int(np.nanargmax(means))

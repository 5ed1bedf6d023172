"""Curves of several runs on one axis, as Open RL Benchmark draws them (arXiv 2402.03046)."""
from collections.abc import Sequence

import numpy as np


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value with up to `window - 1` before it, `f64[N]`."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def on_common_grid(runs: Sequence[tuple[np.ndarray, np.ndarray]], points: int, window: int = 1
                   ) -> tuple[np.ndarray, np.ndarray]:
    """`(x f64[points], y f64[S, points])`: rolling means of S runs, linear between their points.

    `runs`: x, increasing, and y of each run, `[N]`. The grid goes from 0 to the smallest last x, which all runs reached. Raises
    ValueError: no run, or one without points.
    """
    if not runs or not all(len(x) for x, _ in runs):
        raise ValueError("curves need one run at least, and each of them a point")
    grid = np.linspace(0, min(float(x[-1]) for x, _ in runs), points)
    return grid, np.array([np.interp(grid, x, rolling_mean(y, window)) for x, y in runs])


def last_mean(values: np.ndarray, count: int) -> float:
    """Mean of the last `count` values, or of all if there are fewer."""
    return float(np.mean(np.asarray(values, np.float64)[-count:]))

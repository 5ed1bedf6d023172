"""Intervals of rates."""
from typing import NamedTuple

import numpy as np
from scipy import stats


class Proportion(NamedTuple):
    """A share and its interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int, level: float = 0.95) -> Proportion:
    """Wilson's score interval of a share of independent trials; never empty, also at 0 and 1 and for few trials.

    Completions of one problem are not independent: give problems as trials, or see `rates.bootstrap_mean`. Raises ValueError:
    no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes in {trials} trials; give 0 <= successes <= trials and at least one trial")
    z, p = stats.norm.ppf((1 + level) / 2), successes / trials
    centre, spread = p + z * z / (2 * trials), z * np.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    scale = 1 + z * z / trials
    return Proportion(p, float((centre - spread) / scale) if successes else 0.0,
                      float((centre + spread) / scale) if successes < trials else 1.0)


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> Proportion:
    """The exact interval of a share: its coverage is at least `level`."""
    wilson(successes, trials)
    tail = (1 - level) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    return Proportion(successes / trials, float(low), float(high))

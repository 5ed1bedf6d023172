"""The value of a hyperparameter search on seeds that it did not see (arXiv 2306.01324).

`tune f64[configurations, seeds]` and `test f64[configurations, other seeds]` are final scores, higher is better; NaN is a
failed run. The configuration that is kept has the highest mean over the tuning seeds (`comparison.choose`).
"""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from jaxrl_llm.evaluation.comparison import Interval, choose, stratified_bootstrap


class Protocol(NamedTuple):
    """`incumbent`: the row that is kept. `tuned`, `tested`: its means. `gap`: tuned - tested, the over-fit to tuning seeds.

    `interval`: interval of the tested mean, over testing seeds. `regret`: the best test mean minus that of the incumbent.
    `single_seed_regret [s1]`: the regret of the row that each tuning seed alone would keep. `rank_correlation`: Spearman's, of
    the means on tuning and on testing seeds; NaN for a single configuration.
    """

    incumbent: int
    tuned: float
    tested: float
    interval: Interval
    gap: float
    regret: float
    single_seed_regret: np.ndarray
    rank_correlation: float


def protocol(tune: np.ndarray, test: np.ndarray) -> Protocol:
    """The outcome of choosing among all configurations, each of which ran on tuning and on testing seeds.

    Raises ValueError: the two tables have other numbers of configurations, or no configuration ran on all tuning seeds.
    """
    tune, test = np.asarray(tune, np.float64), np.asarray(test, np.float64)
    if tune.ndim != 2 or test.ndim != 2 or len(tune) != len(test):
        raise ValueError(f"tables of tuning and testing have one row a configuration; these are {list(tune.shape)} and "
                         f"{list(test.shape)}")
    kept = choose(tune)
    means = test.mean(axis=1)
    best = float(np.nanmax(means))
    alone = [best - means[choose(column[:, None])] for column in tune.T]
    interval = stratified_bootstrap(lambda strata: strata[0].mean(), [test[kept]])
    ranks = stats.spearmanr(tune.mean(axis=1), means).statistic if len(tune) > 1 else np.nan
    tuned, tested = float(tune[kept].mean()), float(means[kept])
    return Protocol(kept, tuned, tested, interval, tuned - tested, best - tested, np.array(alone), float(ranks))


class Sensitivity(NamedTuple):
    """How much the choice matters. `spread`: best mean minus worst. `median`: the score of a setting drawn at random.

    `seeds`: standard deviation over seeds of one setting, pooled: a spread that is no larger is noise. `single_seed_regret`:
    mean score that choosing by one seed loses against the best mean, on the other tuning seeds; NaN with one seed.
    """

    spread: float
    median: float
    seeds: float
    single_seed_regret: float


def sensitivity(tune: np.ndarray) -> Sensitivity:
    """The sensitivity from the tuning table alone; settings with a failed run are omitted.

    Raises ValueError: every setting has a failed run.
    """
    tune = np.asarray(tune, np.float64)
    tune = tune[~np.isnan(tune).any(axis=1)]
    if not len(tune):
        raise ValueError("every configuration has a run without a result")
    means, seeds = tune.mean(axis=1), tune.shape[1]
    spread_of_seeds, regret = np.nan, np.nan
    if seeds > 1:
        spread_of_seeds = float(np.sqrt(tune.var(axis=1, ddof=1).mean()))
        others = [np.delete(tune, s, axis=1).mean(axis=1) for s in range(seeds)]
        regret = float(np.mean([rest.max() - rest[tune[:, s].argmax()] for s, rest in enumerate(others)]))
    return Sensitivity(float(np.ptp(means)), float(np.median(means)), spread_of_seeds, regret)


def by_value(settings: Sequence[Mapping[str, Any]], tune: np.ndarray) -> dict[str, dict[str, float]]:
    """For each key of the settings the mean score of every value that it takes, over the other keys and the seeds.

    `settings`: one a row of `tune`. Failed runs are omitted; a value without any other run gets NaN.
    """
    means: dict[str, dict[str, float]] = {}
    for key in dict.fromkeys(key for one in settings for key in one):
        for value in dict.fromkeys(str(one[key]) for one in settings if key in one):
            rows = np.asarray(tune, np.float64)[[str(one.get(key)) == value for one in settings]]
            rows = rows[~np.isnan(rows)]
            means.setdefault(key, {})[value] = float(rows.mean()) if len(rows) else float("nan")
    return means

"""Statistics of few runs: published numbers, hand-made curves, and coverage of intervals in simulation."""
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import comparison
from jaxrl_llm.evaluation.paired import paired_difference

X = np.array([[10, 3], [20, 5], [30, 4], [40, 9]]) / [40, 10]  # runs x tasks, normalised
Y = np.array([[15, 3], [15, 4], [25, 4]]) / [40, 10]


def test_aggregates_of_a_worked_example():
    assert comparison.iqm(X) == 0.5375
    assert X.mean() == 0.575
    assert comparison.probability_of_improvement(X.T, Y.T) == 0.6875


def test_the_interquartile_mean_cuts_a_quarter_at_each_end():
    assert comparison.iqm(np.array([0.0, 0.0, 9.0])) == 3.0  # of three values nothing is cut
    assert comparison.iqm(np.array([-100.0, 1.0, 2.0, 100.0])) == 1.5
    assert comparison.iqm(np.array([5.0, 1.0, 2.0, 3.0, -7.0])) == 2.0
    curves = np.array([[0.0, 4.0], [1.0, 3.0], [2.0, 2.0], [30.0, -10.0]])
    np.testing.assert_array_equal(comparison.iqm(curves, axis=0), [1.5, 2.5])


def test_probability_of_improvement_is_mann_whitneys_u():
    random = np.random.default_rng(0)
    x, y = random.integers(0, 6, 7).astype(float), random.integers(0, 6, 5).astype(float)  # with ties
    wanted = stats.mannwhitneyu(x, y).statistic / 35
    assert comparison.probability_of_improvement([x], [y]) == pytest.approx(wanted, abs=1e-12)
    assert comparison.probability_of_improvement([y], [x]) == pytest.approx(1 - wanted, abs=1e-12)
    with pytest.raises(ValueError, match="2 tasks and Y of 1"):
        comparison.probability_of_improvement([x, x], [y])


def test_strata_are_resampled_apart():
    """Two constant strata: if their rows mixed, some draw would differ from the others."""
    result = comparison.stratified_bootstrap(lambda s: s[0].mean() - s[1].mean(), [np.ones(4), np.zeros(4)], resamples=50)
    assert result == (1.0, 1.0, 1.0)
    curves = np.array([[0.0, 1.0], [1.0, 0.0]])  # a run's points stay together: the sum over them is always 1
    assert comparison.stratified_bootstrap(lambda s: s[0].mean(0).sum(), [curves], resamples=50) == (1.0, 1.0, 1.0)


def test_bootstrap_intervals_cover_about_as_often_as_they_say():
    random, covered = np.random.default_rng(3), 0
    for trial in range(150):
        result = comparison.mean_over_runs(random.normal(size=40), resamples=200, seed=trial)
        covered += result.low <= 0 <= result.high
    assert 0.88 <= covered / 150 <= 0.99


@pytest.mark.parametrize("seeds, coverage", ((3, 0.73), (5, 0.89), (10, 0.93)))
def test_how_often_an_interval_over_few_seeds_is_right(seeds, coverage):
    """The coverage is lower than the nominal level: docs/comparing.md gives these numbers."""
    random = np.random.default_rng(0)
    scores = random.normal(size=(1500, 1, seeds))
    drawn = np.take_along_axis(scores, random.integers(seeds, size=(1500, 300, seeds)), axis=2)
    low, high = np.quantile(comparison.iqm(drawn, axis=2), [0.025, 0.975], axis=1)
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(coverage, abs=0.025)


def test_an_interval_of_improvement_contains_the_estimate():
    x, y = np.array([0.5, 0.6, 0.7, 0.65]), np.array([0.4, 0.55, 0.5, 0.62])
    result = comparison.improvement(x, y)
    assert result.value == 12.5 / 16 and 0.3 < result.low < result.value < result.high <= 1


A = np.array([0.0, 10, 20, 40]), np.array([0.1, 0.2, 0.35, 0.5])
B = np.array([0.0, 15, 30]), np.array([0.1, 0.3, 0.38])


def test_curves_at_a_common_budget():
    assert comparison.at_budget(*A, 30.0) == pytest.approx(0.425, abs=1e-12)
    assert comparison.at_budget(*B, 30.0) == pytest.approx(0.38, abs=1e-12)
    assert np.isnan(comparison.at_budget(*B, 30.1))
    assert comparison.budget_to_reach(*A, 0.36) == pytest.approx(21.3333333333, abs=1e-9)
    assert comparison.budget_to_reach(*B, 0.36) == pytest.approx(26.25, abs=1e-12)
    assert comparison.budget_to_reach(*B, 0.39) == np.inf
    assert comparison.budget_to_reach(*B, 0.05) == 0
    assert comparison.best_within(*A, 20) == 0.35
    assert comparison.mean_within(*A, 20) == pytest.approx((0.15 * 10 + 0.275 * 10) / 20)
    assert np.isnan(comparison.mean_within(*B, 31))


def test_lines_without_an_evaluation_are_no_points():
    x, y = np.arange(5.0), np.array([0.0, np.nan, np.nan, 0.6, np.nan])
    assert comparison.at_budget(x, y, 2.0) == pytest.approx(0.4)
    assert np.isnan(comparison.at_budget(x, y, 3.5)) and np.isnan(comparison.at_budget(x, np.full(5, np.nan), 1.0))
    assert comparison.budget_to_reach(x, y, 0.3) == 1.5


def test_the_choice_is_made_on_means_over_tuning_seeds():
    assert comparison.choose(np.array([[0.5, 0.7], [0.9, 0.2], [0.6, 0.65]])) == 2
    assert comparison.choose(np.array([[0.9, np.nan], [0.2, 0.3]])) == 1
    with pytest.raises(ValueError, match="without a result"):
        comparison.choose(np.array([[np.nan]]))


def test_a_paired_difference_against_scipy():
    random = np.random.default_rng(1)
    b = random.random(9)
    a = b + random.normal(0.05, 0.1, 9)
    result = paired_difference(a, b)
    wanted = stats.permutation_test((a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf)
    assert result.mean == pytest.approx((a - b).mean()) and result.p_value == pytest.approx(wanted.pvalue)
    assert result.low < result.mean < result.high


def test_the_smallest_p_value_of_few_pairs():
    assert paired_difference(np.arange(5) + 1.0, np.zeros(5)).p_value == 2 / 32
    assert paired_difference(np.ones(200), np.zeros(200)).p_value == 1 / 10_001
    assert paired_difference(np.ones(5), np.ones(5)) == (0, 0, 0, 1)


def test_equal_policies_are_rejected_about_as_often_as_they_should_be():
    random, rejected = np.random.default_rng(5), 0
    for trial in range(150):
        scores = random.normal(size=(2, 40))
        rejected += paired_difference(*scores, flips=300, resamples=10, seed=trial).p_value < 0.05
    assert 1 <= rejected <= 16  # 7.5 expected


def test_pairs_must_match():
    with pytest.raises(ValueError, match=r"\[2\] and \[3\]"):
        paired_difference(np.zeros(2), np.zeros(3))

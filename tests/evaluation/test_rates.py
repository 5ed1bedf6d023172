"""Intervals that keep a problem's samples together; pass@k against counting all subsets."""
import itertools

import numpy as np
import pytest

from jaxrl_llm.evaluation.rates import bootstrap_mean, pass_at_k


def test_mean_and_interval_of_known_cases():
    assert bootstrap_mean(np.ones((5, 3))) == (1.0, 1.0, 1.0)
    scores = np.repeat([[1.0], [0.0]], 50, axis=0)  # 100 problems, half right
    result = bootstrap_mean(scores)
    assert result.mean == 0.5
    half = 1.96 * np.sqrt(0.25 / 100)
    assert abs(result.low - (0.5 - half)) < 0.02 and abs(result.high - (0.5 + half)) < 0.02


def test_more_samples_of_the_same_problems_do_not_narrow_the_interval():
    per_problem = np.random.default_rng(0).integers(0, 2, (40, 1)).astype(float)
    one, many = bootstrap_mean(per_problem), bootstrap_mean(np.repeat(per_problem, 30, axis=1))
    assert one == many


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        skill = random.beta(2, 3, size=(60, 1))
        result = bootstrap_mean(random.random((60, 4)) < skill, seed=trial, resamples=300)
        covered += result.low <= 0.4 <= result.high
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("n, k", ((1, 1), (4, 1), (4, 2), (5, 3), (4, 4)))
def test_pass_at_k_equals_the_share_of_subsets_with_a_hit(n, k):
    scores = np.array([[i < c for i in range(n)] for c in range(n + 1)], float)
    subsets = list(itertools.combinations(range(n), k))
    wanted = np.mean([np.mean([row[list(s)].any() for s in subsets]) for row in scores])
    assert pass_at_k(scores, k) == pytest.approx(wanted, abs=1e-12)


def test_pass_at_k_beyond_the_samples_is_refused():
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples per problem; there are 4"):
            pass_at_k(np.zeros((2, 4)), k)

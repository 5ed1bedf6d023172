"""pass@k and votes against counting every subset, and published numbers; intervals of rates against their definitions."""
import itertools

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import intervals, pass_until
from jaxrl_llm.evaluation.pass_at_k import Votes, boundary, count_votes, majority_at_k, pass_at_k


def test_pass_at_k_of_worked_examples():
    result = [pass_at_k([8], [3], k)[0] for k in (1, 2, 4)]
    np.testing.assert_allclose(result, [0.375, 0.642857142857, 0.928571428571], rtol=1e-11)
    assert pass_at_k([10], [1], 5)[0] == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k([6], [0], 3)[0] == 0


@pytest.mark.parametrize("n", (1, 4, 7))
def test_pass_at_k_equals_the_share_of_subsets_with_a_hit(n):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        wanted = [np.mean([any(i < c for i in subset) for subset in subsets]) for c in range(n + 1)]
        np.testing.assert_allclose(pass_at_k(n, np.arange(n + 1), k), wanted, atol=1e-13)


def test_pass_at_k_of_many_samples():
    """Exact integers of Python as the reference; the usual 1 - (1 - c/n)^k is too low."""
    from math import comb
    n = 4096
    counts = np.array([1, 2, 100, 3000, 3073, 4096])
    wanted = [1 - comb(n - int(c), 1024) / comb(n, 1024) for c in counts]
    result = pass_at_k(np.full(6, n), counts, 1024)
    np.testing.assert_allclose(result, wanted, rtol=1e-10)
    assert (1 - (1 - counts[:2] / n) ** 1024 < result[:2]).all()


def test_pass_at_more_than_there_are_samples_cannot_hide_in_a_mean():
    result = pass_at_k(np.array([4, 8]), np.array([1, 1]), 5)
    assert np.isnan(result[0]) and result[1] == pytest.approx(0.625, abs=1e-12)
    with pytest.raises(ValueError, match="0 <= correct <= samples"):
        pass_at_k([4], [5], 1)


def test_a_vote_of_a_worked_example():
    votes = count_votes([7, 7, 8, None], [True, True, False, False])
    assert votes == Votes(2, (1,), 1)
    result = [majority_at_k(votes, k) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(result, [0.5, 2 / 3, 0.75, 1], atol=1e-14)


def vote(answers):
    given = [a for a in answers if a is not None]
    top = max(map(given.count, given), default=0)
    tied = {a for a in given if given.count(a) == top}
    return ("right" in tied) / len(tied) if tied else 0.0


@pytest.mark.parametrize("votes", (Votes(2, (1, 1, 3), 2), Votes(3, (3, 3), 0), Votes(1, (1, 1, 1, 1, 1), 1),
                                   Votes(0, (2, 1), 3), Votes(4, (), 3), Votes(2, (4, 2), 1)))
def test_votes_equal_the_mean_over_all_subsets(votes):
    answers = ["right"] * votes.right + [w for w, size in enumerate(votes.wrong) for _ in range(size)] + [None] * votes.none
    for k in range(1, votes.samples + 1):
        wanted = np.mean([vote(subset) for subset in itertools.combinations(answers, k)])
        assert majority_at_k(votes, k) == pytest.approx(wanted, abs=1e-12), k
    assert np.isnan(majority_at_k(votes, votes.samples + 1))


def test_votes_of_a_thousand_samples():
    assert majority_at_k(Votes(300, (299, 200, 100), 125), 1024) == 1.0
    assert majority_at_k(Votes(400, (400,) + (1,) * 200, 24), 1024) == pytest.approx(0.5)
    random = np.random.default_rng(0)
    votes = Votes(200, (180, 150) + (1,) * 100, 70)
    drawn = random.multivariate_hypergeometric([200, 180, 150, 100, 70], 32, size=20_000)
    top = drawn[:, 1:3].max(1)
    wins = np.where(drawn[:, 0] > top, 1, np.where(drawn[:, 0] == top, 0.5, 0)).mean()  # other ties hardly matter
    assert majority_at_k(votes, 32) == pytest.approx(wins, abs=0.015)
    with pytest.raises(ValueError, match="at most 1024"):
        majority_at_k(Votes(2000, (1,), 0), 2)


def test_a_right_answer_in_two_spellings_is_one():
    assert count_votes(["1/2", "0.5", "2", None, "2"], [True, True, False, False, False]) == Votes(2, (2,), 1)


def test_the_boundary_of_two_models():
    assert boundary([0, 0.5, 0.1, 0.2, 0], [0.1, 0.5, 0, 0.4, 0]) == (1, 1, 2, 1)


def test_wilson_is_the_set_that_a_score_test_accepts():
    for successes, trials in ((0, 7), (3, 10), (10, 10), (501, 1000)):
        result = intervals.wilson(successes, trials)
        for bound in (result.low, result.high):
            if 0 < bound < 1:
                z = (successes / trials - bound) / np.sqrt(bound * (1 - bound) / trials)
                assert abs(z) == pytest.approx(1.959963985, abs=1e-8)
    assert intervals.wilson(0, 7).low == 0 and intervals.wilson(7, 7).high == 1
    with pytest.raises(ValueError, match="at least one trial"):
        intervals.wilson(0, 0)


def test_wilson_covers_on_average_and_the_exact_interval_always():
    for p in (0.02, 0.3, 0.5):
        chances = stats.binom.pmf(np.arange(31), 30, p)
        wilson = [intervals.wilson(x, 30) for x in range(31)]
        exact = [intervals.clopper_pearson(x, 30) for x in range(31)]
        def inside(result):
            return sum(c for c, i in zip(chances, result) if i.low <= p <= i.high)
        assert inside(exact) >= 0.95 and 0.91 <= inside(wilson) <= 0.99


@pytest.mark.parametrize("tries, rate, unbiased, low, high", (
    (5, 0.4, 0.25, 0.0527450, 0.8058796), (137, 0.0145985, 0.0073529, 0.0017729, 0.0402860),
    (2, 1, 1, 0.1581139, 1), (4000, 0.0005, 0.00025006, 6.056e-5, 0.00139246)))
def test_sampling_until_two_successes(tries, rate, unbiased, low, high):
    result = pass_until.pass_until_interval(tries, 2)
    np.testing.assert_allclose(result, [rate, low, high], rtol=2e-4 if tries == 4000 else 1e-5, atol=1e-7)
    assert pass_until.pass_until(tries, 2, unbiased=True) == pytest.approx(unbiased, rel=1e-4)


def test_giving_up():
    result = pass_until.pass_until_interval(1000, 1)
    np.testing.assert_allclose(result, [0.001, 2.53e-5, 0.0055589], rtol=1e-3)
    for wrong in ((0, 0, 2), (5, 3, 2), (1, 2, 2)):
        with pytest.raises(ValueError, match="cannot be"):
            pass_until.pass_until(*wrong)


def test_the_unbiased_rate_and_its_interval_in_simulation():
    random = np.random.default_rng(0)
    tries = 2 + random.negative_binomial(2, 0.03, size=2000)
    result = [pass_until.pass_until(int(k), 2, unbiased=True) for k in tries]
    assert np.mean(result) == pytest.approx(0.03, abs=0.002)
    assert np.mean(2 / tries) > 0.045  # the plain rate is far too high
    covered = [i.low <= 0.03 <= i.high for i in (pass_until.pass_until_interval(int(k), 2) for k in tries[:400])]
    assert np.mean(covered) >= 0.93

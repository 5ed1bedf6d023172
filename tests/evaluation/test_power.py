"""What a paired test can see: against tables, simulation and limits."""
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation.power import paired_deviation, power, smallest_difference


def test_power_is_that_of_simulated_tests():
    random = np.random.default_rng(0)
    result = stats.ttest_1samp(random.normal(1.0, 1.0, (20_000, 8)), 0.0, axis=1).pvalue < 0.05
    assert power(1.0, 1.0, 8) == pytest.approx(result.mean(), abs=0.01)
    assert power(0.0, 1.0, 8) == pytest.approx(0.05, abs=1e-9)  # no effect: false alarms alone
    assert power(0.5, 2.0, 30) == pytest.approx(power(-0.5, 2.0, 30))


def test_smallest_difference_of_a_worked_example():
    """G*Power's table: d = 1.156 for 8 pairs, two-sided 5%, power 80%; it scales with the deviation and shrinks with pairs."""
    assert smallest_difference(1.0, 8) == pytest.approx(1.156, abs=2e-3)
    assert smallest_difference(0.03, 8) == pytest.approx(0.03 * smallest_difference(1.0, 8))
    assert smallest_difference(1.0, 32) < smallest_difference(1.0, 8) / 2
    assert power(smallest_difference(0.2, 5), 0.2, 5) == pytest.approx(0.8, abs=1e-6)


def test_deviation_of_pairs_leaves_out_what_seeds_share():
    seeds = np.array([0.1, 0.5, 0.9])
    assert paired_deviation(np.stack([seeds, seeds + 0.2])) == pytest.approx(0, abs=1e-12)
    result = paired_deviation(np.stack([seeds, seeds + [0.1, 0.2, 0.3], seeds]))
    assert result == pytest.approx(np.sqrt((0.01 + 0.01 + 0) / 3))


@pytest.mark.parametrize("call", [lambda: smallest_difference(1.0, 1), lambda: power(1.0, 0.0, 8),
                                  lambda: paired_deviation(np.ones((1, 3))), lambda: paired_deviation(np.ones((2, 1)))])
def test_no_spread_can_be_known(call):
    with pytest.raises(ValueError, match="2"):
        call()

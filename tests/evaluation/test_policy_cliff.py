"""Ties of rewards: the bandit in worked numbers, bounds on random decision processes, classes among the ties."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import policy_cliff as cliff

R, CHANGE = np.array([1.0, 1, 0]), np.array([1e-3, 0, 0])


def test_the_bandit_of_a_worked_example():
    assert cliff.optimal(R).sum() == 2 and cliff.gap(R) == 1
    assert cliff.total_variation(cliff.policy(R), cliff.policy(R + CHANGE)) == 0.5
    assert cliff.flips(R, CHANGE)
    for alpha, moved, bound in ((1, 0.00024398, 0.0005), (0.1, 0.00249998, 0.005), (0.01, 0.02497919, 0.05),
                                (0.001, 0.23105858, 0.5)):
        assert cliff.total_variation(cliff.policy(R, alpha), cliff.policy(R + CHANGE, alpha)) == pytest.approx(moved, abs=5e-9)
        assert cliff.soft_bound(CHANGE, alpha) == pytest.approx(bound, rel=1e-12)
    assert cliff.gap(np.ones(3)) == np.inf and cliff.soft_bound(CHANGE, 1e-9) == 1


def test_no_flip_without_a_tie_and_the_policy_stays():
    values = np.array([[1.0, 0.9, 0.0], [1.0, 1.0, 0.0]])
    change = np.array([[0.04, 0.0, 0.0], [0.0, 0.0, 5.0]])
    np.testing.assert_array_equal(cliff.flips(values, change), [False, True])
    assert not cliff.flips(values[0], -change[0]) and cliff.total_variation(
        cliff.policy(values[0]), cliff.policy(values[0] - change[0])) == 0


def test_the_reward_decides_where_one_class_is_tied():
    rewards = np.array([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    classes = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 2]])
    np.testing.assert_array_equal(cliff.degenerate(rewards, classes), [False, True, True])

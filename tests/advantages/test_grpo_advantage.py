"""GRPO's group z-score against literal numbers and a float64 re-derivation."""

import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists


def grpo(rollouts, **hyper):
    values, state = advantages.grpo(**hyper).update(rollouts, ())
    assert state == ()
    return np.asarray(values)


def test_worked_example():
    # mean .25, sample std .5
    values = grpo(from_lists([[1, 0, 0, 0]]))
    np.testing.assert_allclose(values[0, :, 0], [1.499997, -0.499999, -0.499999, -0.499999], atol=5e-7)


def test_every_token_of_a_rollout_gets_its_advantage():
    values = grpo(from_lists([[1, 0]], lengths=[[2, 1]]))
    np.testing.assert_allclose(values, [[[0.70710578, 0.70710578], [-0.70710578, 0]]], atol=1e-7)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e4])
def test_a_group_of_equals_gets_exactly_zero(reward):
    assert not np.any(grpo(from_lists([[reward] * 7])))


def test_a_group_of_one():
    assert grpo(from_lists([[2.0]])) == 0
    np.testing.assert_allclose(grpo(from_lists([[2.0]]), singleton="raw"), 2 / (1 + 1e-6), rtol=1e-7)


def test_groups_of_different_size_do_not_mix():
    rewards = [[1, 0, 0.5], [3, 1]]
    values = grpo(from_lists(rewards), ddof=0, eps=1e-4)
    for p, row in enumerate(rewards):
        row = np.asarray(row, np.float64)
        expected = (row - row.mean()) / (row.std(ddof=0) + 1e-4)
        np.testing.assert_allclose(values[p, : len(row), 0], expected, rtol=1e-6)
    assert values[1, 2, 0] == 0


def test_errors_name_the_nearest_match():
    with pytest.raises(ValueError, match="'ddoff'.*Did you mean 'ddof'"):
        advantages.grpo(ddoff=1)
    with pytest.raises(ValueError, match="'zeros'.*Did you mean 'zero'"):
        advantages.grpo(singleton="zeros")

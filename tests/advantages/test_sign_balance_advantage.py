"""SignBalance by hand: right rollouts have one magnitude, and the advantages of a group sum to 0."""
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists


def balanced(rollouts, **numbers):
    return np.asarray(advantages.make("sign_balance", **numbers).update(rollouts, ())[0])[..., 0]


def test_worked_example():
    """2 of 8 are right: 2 x 1 = 6 x 1/3. 7 of 8: 7 x 1 = 1 x 7. Where all are right, or all wrong, there is no ratio."""
    A = balanced(from_lists([[1, 0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [1] * 8, [0] * 8]))
    wrong = -0.33333334
    np.testing.assert_array_equal(A, np.float32([
        [1, wrong, wrong, 1, wrong, wrong, wrong, wrong], [1, 1, 1, 1, 1, 1, 1, -7], [0] * 8, [0] * 8]))
    np.testing.assert_allclose(A.sum(1), 0, atol=1e-6)
    np.testing.assert_array_equal(balanced(from_lists([[1, 0, 0]]), scale=0.5), [[0.5, -0.25, -0.25]])


def test_what_is_not_valid_counts_on_no_side():
    rollouts = from_lists([[1, 0, 0, 1]])
    A = balanced(rollouts.replace(valid=rollouts.valid.at[0, 2:].set(False)))
    np.testing.assert_array_equal(A, [[1, -1, 0, 0]])
    A = balanced(rollouts.replace(valid=rollouts.valid.at[0, 1:3].set(False)))  # the right ones alone are left
    np.testing.assert_array_equal(A, [[0, 0, 0, 0]])


def test_grpo_s_magnitude_grows_where_right_rollouts_are_rare_and_this_does_not():
    lone, half = from_lists([[1] + [0] * 15]), from_lists([[1] * 8 + [0] * 8])
    assert [balanced(x)[0, 0] for x in (lone, half)] == [1, 1]
    of_grpo = [np.asarray(advantages.make("grpo", ddof=0, eps=0.0).update(x, ())[0])[0, 0, 0] for x in (lone, half)]
    np.testing.assert_allclose(of_grpo, [3.8729833, 1], rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_scale_that_is_no_magnitude_is_an_error(scale):
    with pytest.raises(ValueError, match="scale=.*; give more than 0, finite"):
        advantages.make("sign_balance", scale=scale)

"""The chain of scores in worked numbers, constant scores, and the mass of wrong candidates."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import predict_downstream as downstream

LOGPROBS = np.log([[[.2, .1, .1]], [[.3, .4, .1]], [[.5, .1, .2]]])
COMPUTE, CORRECT = np.array([1, 10, 100]), np.array([0])


def test_a_worked_example():
    result = downstream.chain(LOGPROBS, CORRECT)
    np.testing.assert_allclose(result["p among choices"][:, 0], [.5, .375, .625])
    np.testing.assert_allclose(result["negative Brier"][:, 0], [-.375, -.65625, -.21875])
    np.testing.assert_array_equal(result["accuracy"][:, 0], [1, 0, 1])
    pearson = [downstream.correlations(result[stage], COMPUTE)[0] for stage in downstream.STAGES]
    assert pearson == pytest.approx([.9978, .9820, .5, .3524, 0], abs=5e-5)
    kendall = [downstream.correlations(result[stage], COMPUTE, "kendall")[0] for stage in downstream.STAGES]
    assert kendall == pytest.approx([1, 1, .3333, .3333, 0], abs=5e-5)


def test_a_constant_score_is_undefined_and_left_out_of_the_survivors():
    scores = np.array([[1.0, 0], [1, 1], [1, 2]])
    result = downstream.correlations(scores, COMPUTE, "spearman")
    assert np.isnan(result[0]) and result[1] == pytest.approx(1)
    np.testing.assert_array_equal(downstream.survival(result, np.array([-1, 0.5, 1.1])), [1, 1, 0])
    assert np.isnan(downstream.survival(result[:1], np.array([0.0]))).all()


def test_the_order_of_candidates_and_padding_do_not_matter():
    padded = np.concatenate([LOGPROBS[..., [1, 0, 2]], np.full((3, 1, 1), -np.inf)], axis=-1)
    result, wanted = downstream.chain(padded, np.array([1])), downstream.chain(LOGPROBS, CORRECT)
    for stage in downstream.STAGES:
        np.testing.assert_allclose(result[stage], wanted[stage], atol=1e-12)
    np.testing.assert_allclose(downstream.incorrect_mass(padded, np.array([1]))[:, 0], np.log([.2, .5, .3]), atol=1e-12)
    assert downstream.co_variation(padded, np.array([1]))[0] == pytest.approx(
        np.corrcoef(np.log([.2, .3, .5]), np.log([.2, .5, .3]))[0, 1])


def test_the_first_of_equals_is_the_answer():
    tied = np.log([[[.3, .3, .1]]])
    assert downstream.chain(tied, np.array([0]))["accuracy"] == 1 and downstream.chain(tied, np.array([1]))["accuracy"] == 0

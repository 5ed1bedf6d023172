"""Ratios of a perturbed policy in worked numbers, their invariances, and the divergence."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import alp

SAMPLED = np.log([[0.4, 0.5, 0.6], [0.5, 0.3, 1.0]])
RATIO = np.array([[1.5, 1.1, 0.5], [0.5, 1.5, 7.0]])
MASK = np.array([[True, True, True], [True, True, False]])


def test_a_worked_example():
    perturbed = SAMPLED + np.log(RATIO)
    for level, wanted in (("token", [[1.5, 1.1, .5], [.5, 1.5, 0]]), ("sequence", [[.825] * 3, [.75, .75, 0]]),
                          ("cumulative", [[1.5, 1.65, .825], [.5, .75, 0]])):
        np.testing.assert_allclose(alp.ratios(perturbed, SAMPLED, MASK, level), wanted, atol=1e-12)
    geometric = alp.ratios(perturbed, SAMPLED, MASK, "sequence", geometric=True)
    np.testing.assert_allclose(geometric[:, 0], [.825 ** (1 / 3), .75 ** .5])
    geometric = alp.ratios(perturbed, SAMPLED, MASK, "cumulative", geometric=True)
    np.testing.assert_allclose(geometric[0], [1.5, 1.65 ** .5, .825 ** (1 / 3)])


def test_what_lies_outside_of_the_mask_does_not_count():
    other = np.where(MASK, SAMPLED, np.nan)
    for level in alp.LEVELS:
        np.testing.assert_array_equal(alp.ratios(other, other, MASK, level), MASK.astype(float))
    assert alp.divergence(SAMPLED, SAMPLED, MASK) == 0
    huge = SAMPLED + np.array([30.0, 30, 30])
    assert alp.ratios(huge, SAMPLED, MASK, "token").max() == pytest.approx(np.exp(20))


def test_the_divergence_is_that_of_distributions():
    random = np.random.default_rng(0)
    p, q = random.dirichlet(np.ones(6)), random.dirichlet(np.ones(6))
    drawn = random.choice(6, 400_000, p=p)
    result = alp.divergence(np.log(q)[drawn], np.log(p)[drawn], np.ones(len(drawn), bool))
    assert result == pytest.approx((p * np.log(p / q)).sum(), rel=0.02) and result > 0


def test_tails():
    ratios, mask = np.array([[0.5, 1.0, 2.0, 99.0]]), np.array([[True, True, True, False]])
    assert alp.tails(ratios, mask, 1.0) == (0.5, 2.0)

"""Gradients of distillation in worked numbers, by finite differences of the losses, and undefined cases."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import opd_alignment as opd

PI, PT, Q = np.array([.5, .3, .2]), np.array([.2, .7, .1]), np.array([.2, .8, .4])


def test_a_worked_example():
    goal = opd.ideal(PI, Q)
    np.testing.assert_allclose(goal, [-.11, .114, -.004], atol=1e-12)
    for loss, gradient, score in (
            ("forward_kl", [-.3, .4, -.1], .977687), ("reverse_kl", [-.286853, .356965, -.070112], .987932),
            ("jsd", [-.068512, .089018, -.020506], .981847)):
        result = opd.distillation(PI, PT, loss)
        np.testing.assert_allclose(result, gradient, atol=5e-7)
        assert opd.cosine(goal, result) == pytest.approx(score, abs=5e-7)
    assert opd.teacher_advantage(PI, PT, Q) == pytest.approx(.22, abs=1e-12)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def falls(loss, logits, b=0.3):
    """The losses themselves."""
    pi = softmax(logits)
    m = (1 - b) * pi + b * PT
    return {"forward_kl": (PT * np.log(PT / pi)).sum(), "reverse_kl": (pi * np.log(pi / PT)).sum(),
            "jsd": (1 - b) * (pi * np.log(pi / m)).sum() + b * (PT * np.log(PT / m)).sum()}[loss]


@pytest.mark.parametrize("loss", opd.LOSSES)
def test_gradients_are_the_slopes_of_the_losses(loss):
    logits, step = np.log(PI) + 0.7, 1e-6
    slopes = [(falls(loss, logits + step * e) - falls(loss, logits - step * e)) / (2 * step) for e in np.eye(3)]
    np.testing.assert_allclose(opd.distillation(PI, PT, loss, mix=0.3), -np.array(slopes), atol=1e-8)


def test_success_by_finite_differences_and_shifts_of_success():
    step = 1e-6
    slopes = [(softmax(np.log(PI) + step * e) @ Q - softmax(np.log(PI) - step * e) @ Q) / (2 * step) for e in np.eye(3)]
    np.testing.assert_allclose(opd.ideal(PI, Q), slopes, atol=1e-9)
    np.testing.assert_allclose(opd.ideal(PI, Q + 5), opd.ideal(PI, Q), atol=1e-12)


def test_unvisited_tokens_are_left_out_and_equal_success_scores_nothing():
    visited = np.array([True, False, True])
    kept = opd.restrict(PI, visited)
    np.testing.assert_allclose(kept, [.5 / .7, 0, .2 / .7])
    for loss in opd.LOSSES:
        result = opd.distillation(kept, opd.restrict(PT, visited), loss)
        assert result[1] == 0 and result.sum() == pytest.approx(0, abs=1e-12)
    assert opd.cosine(opd.ideal(PI, np.full(3, .5)), PT - PI) == 0
    np.testing.assert_array_equal(opd.restrict(PI, np.zeros(3, bool)), np.zeros(3))
    assert not opd.distillation(PI, PI, "reverse_kl").any()

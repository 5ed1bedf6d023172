"""Histograms of scalars: the paper's construction on numbers worked out by hand."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.values import hl_gauss

BORDERS = hl_gauss.edges(0.0, 1.0, 5)
LOGITS = jnp.array([[0.0, 0.5, 1.0, 0.5, 0.0]])


def test_histograms():
    result = hl_gauss.histogram(jnp.array([0.5, 0.62, 0.0, 1.0, -3.0]), BORDERS)
    wanted = [[.022340, .229940, .495440, .229940, .022340], [.002552, .069070, .377873, .440462, .110044],
              [.817578, .174762, .007597, .000063, .000000], [.000000, .000063, .007597, .174762, .817578]]
    np.testing.assert_allclose(result, [*wanted, wanted[2]], atol=6e-7)
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(result[:4] @ hl_gauss.centres(BORDERS), [.5, .617275, .138029, .861971], atol=1e-6)


def test_loss_value_and_gradient():
    target = hl_gauss.histogram(jnp.array([0.62]), BORDERS)
    loss, gradient = jax.value_and_grad(hl_gauss.cross_entropy)(LOGITS, target, jnp.ones(1))
    np.testing.assert_allclose(loss, 1.448767, atol=1e-6)
    np.testing.assert_allclose(gradient[0], [.122203, .136616, -.038754, -.234776, .014711], atol=1e-6)
    np.testing.assert_allclose(hl_gauss.value(LOGITS, BORDERS), [.5], atol=1e-6)
    two = jnp.concatenate([LOGITS, 7 * LOGITS]), jnp.concatenate([target, target])
    np.testing.assert_allclose(hl_gauss.cross_entropy(*two, jnp.array([1.0, 0.0])), 1.448767, atol=1e-6)  # weights mask
    assert hl_gauss.cross_entropy(*two, jnp.zeros(2)) == 0


def test_margins_keep_the_mean_of_targets_at_the_ends():
    borders = hl_gauss.widened(0.0, 1.0, 51)
    np.testing.assert_allclose([borders[2], borders[-3]], [0, 1], atol=1e-6)
    means = hl_gauss.histogram(jnp.array([0.0, 0.3, 1.0]), borders) @ hl_gauss.centres(borders)
    np.testing.assert_allclose(means, [0, 0.3, 1], atol=6e-4)


def test_impossible_supports_are_refused():
    for make in (lambda: hl_gauss.edges(0, 1, 1), lambda: hl_gauss.edges(1, 1, 5), lambda: hl_gauss.widened(0, 1, 5)):
        with pytest.raises(ValueError, match="bins="):
            make()

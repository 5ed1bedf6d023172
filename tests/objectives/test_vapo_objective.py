"""VAPO's loss on one example by hand; the likelihood of right answers has a denominator of its own."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import from_lists

OLD = jnp.full((1, 2, 2), -1.0)
EXAMPLE = from_lists([[1, 0]], lengths=[[2, 1]], old_logprobs=OLD)
NEW = OLD + jnp.log(jnp.array([[[1.5, 1.25], [0.5, 1.0]]]))
ADVANTAGES = jnp.array([[[1.0, 1.0], [-2.0, 9.0]]])


def loss_of(example, coef=0.1):
    vapo = objectives.of(f"ppo_clip(clip_high=0.28) + nll({coef})")
    (loss, (result, _)), slope = jax.value_and_grad(vapo.update, has_aux=True)(NEW, example, ADVANTAGES, ())
    return float(loss), result, np.asarray(slope)


def test_worked_example():
    """Ratios 1.5 (bounded at 1.28), 1.25 (inside) and 0.5 (a negative advantage: bounded at 0.8)."""
    surrogate = (-1.28 - 1.25 + 2 * 0.8) / 3
    likelihood = (-1 + np.log(1.5) - 1 + np.log(1.25)) / 2
    loss, result, slope = loss_of(EXAMPLE)
    assert loss == pytest.approx(surrogate - 0.1 * likelihood, abs=1e-6)
    assert result["clip_fraction"] == pytest.approx(2 / 3)
    np.testing.assert_allclose(slope, [[[-0.05, -1.25 / 3 - 0.05], [0, 0]]], atol=1e-6)
    assert loss_of(EXAMPLE, 0)[0] == pytest.approx(surrogate, abs=1e-6)


def test_the_record_decides_which_rollouts_are_right():
    recorded = EXAMPLE.replace(extras={"correct": jnp.array([[False, True]])})
    surrogate, likelihood = (-1.28 - 1.25 + 2 * 0.8) / 3, -1 + np.log(0.5)
    assert loss_of(recorded)[0] == pytest.approx(surrogate - 0.1 * likelihood, abs=1e-6)
    nobody = EXAMPLE.replace(rewards=jnp.zeros((1, 2)))
    assert loss_of(nobody)[0] == pytest.approx(surrogate, abs=1e-6)

"""G-OPD and ExOPD from log-probs of the teacher to loss and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists


def log(*probabilities):
    return jnp.log(jnp.array([[probabilities]]))


NEW, BASE, TEACHER = log(0.42, 0.28), log(0.3, 0.3), log(0.6, 0.1)
ROLLOUTS = from_lists([[0]], lengths=[[2]], old_logprobs=log(0.4, 0.3), behavior_logprobs=log(0.4, 0.25),
                      extras={"teacher_logprobs": TEACHER, "base_logprobs": BASE})
SEVERAL = ROLLOUTS.replace(extras={"teacher_logprobs": jnp.stack([BASE, TEACHER], axis=-1), "base_logprobs": BASE,
                                   "teacher_id": jnp.array([1])})


@pytest.mark.slow
@pytest.mark.parametrize("slug, rollouts, weight, expected, loss, gradient", [
    ("gopd", ROLLOUTS, 0.5, [0.058892, -0.549306], 0.276693, [-0.030918, 0.307611]),
    ("gopd", ROLLOUTS, 1.0, [0.405465, -1.098612], 0.402354, [-0.212869, 0.615223]),
    ("exopd", SEVERAL, 1.25, [0.578752, -1.373265], 0.465184, [-0.303845, 0.769029])])
def test_worked_example(slug, rollouts, weight, expected, loss, gradient):
    values, _ = advantages.make(slug, teacher_weight=weight).update(rollouts, ())
    np.testing.assert_allclose(values[0, 0], expected, atol=1e-6)
    update = jax.value_and_grad(objectives.make("gopd").update, has_aux=True)
    (total, (metrics, _)), slope = update(NEW, rollouts, values, ())
    np.testing.assert_allclose(total, loss, atol=1e-6)
    np.testing.assert_allclose(slope[0, 0], gradient, atol=1e-6)
    np.testing.assert_allclose(metrics["weight"], 1.1, rtol=1e-6)


def test_defaults_and_the_base():
    values, _ = advantages.make("exopd").update(SEVERAL, ())
    np.testing.assert_allclose(values[0, 0], [0.578752, -1.373265], atol=1e-6)
    other = ROLLOUTS.replace(extras={**ROLLOUTS.extras, "base_logprobs": log(0.9, 0.01)})
    plain = [advantages.make("gopd").update(rollouts, ())[0] for rollouts in (ROLLOUTS, other)]
    np.testing.assert_allclose(*plain, atol=1e-6)
    pull, _ = advantages.make("gopd", teacher_weight=0.0).update(ROLLOUTS, ())
    np.testing.assert_allclose(pull, BASE - ROLLOUTS.old_logprobs, atol=1e-6)
    first, _ = advantages.make("exopd").update(SEVERAL.replace(extras={**SEVERAL.extras, "teacher_id": jnp.array([0])}), ())
    np.testing.assert_allclose(first, BASE - ROLLOUTS.old_logprobs, atol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 2\), expected \[P, G, T, teachers\]"):
        advantages.make("exopd").update(ROLLOUTS.replace(extras={**ROLLOUTS.extras, "teacher_id": jnp.array([0])}), ())


def test_loss_against_float64_where_every_bound_is_met():
    rng = np.random.default_rng(0)
    shape = (2, 3, 5)
    mask = rng.random(shape) < 0.8
    old, behavior, new = (rng.normal(scale=1.5, size=shape) - 3 for _ in range(3))
    values = rng.normal(size=shape)
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.ones((2, 3), bool), old_logprobs=jnp.float32(old),
                        behavior_logprobs=jnp.float32(behavior))
    update = jax.value_and_grad(objectives.make("gopd").update, has_aux=True)
    (loss, (metrics, _)), gradient = update(jnp.float32(new), rollouts, jnp.float32(values), ())

    ratio, weight = np.exp(new - old), np.minimum(np.exp(old - behavior), 5)
    free, clipped = -values * ratio, -values * np.clip(ratio, 0.8, 1.2)
    token = np.maximum(free, clipped)
    bounded = (values < 0) & (token > -3 * values)
    token = np.where(bounded, -3 * values, token)
    slope = np.where((free >= clipped) & ~bounded, free, 0) * weight
    np.testing.assert_allclose(loss, (weight * token)[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, slope, 0) / mask.sum(), atol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction_lower"], bounded[mask].mean(), rtol=1e-6)
    assert bounded[mask].any() and (weight[mask] == 5).any() and (clipped > free)[mask].any()


def test_dual_clip_has_to_exceed_one():
    with pytest.raises(ValueError, match="larger than 1"):
        objectives.make("gopd", dual_clip=1.0)

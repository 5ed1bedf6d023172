"""GAE on one example by hand and against a float64 loop over masks with holes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.ppo_gae import value_targets
from jaxrl_llm.data.rollouts import Rollouts, from_lists

VALUES = jnp.array([[[0.5, 0.6, 0.8]]])
EXAMPLE = from_lists([[1]], lengths=[[3]], extras={"values": VALUES}, old_logprobs=np.zeros((1, 1, 3), np.float32))
NEW = jnp.array([[[0.1, -0.3, 0.4]]])


@pytest.mark.parametrize("hyper, expected, loss", [
    ({"whiten": False}, [0.4705, 0.39, 0.2], -0.349634),
    ({}, [0.842364, 0.262789, -1.105153], 0.174353),
    ({"length_alpha": 1.0, "whiten": False}, [0.322222, 0.333333, 0.2], -0.281017),
    ({"length_alpha": 0.05, "whiten": False}, [0.1, 0.2, 0.2], None)])
def test_worked_example(hyper, expected, loss):
    values, _ = advantages.make("ppo_gae", **hyper).update(EXAMPLE, ())
    np.testing.assert_allclose(values[0, 0], expected, atol=1e-6)
    if loss is not None:
        result, _ = objectives.ppo_clip(dual_clip=3.0).update(NEW, EXAMPLE, values, ())
        np.testing.assert_allclose(result, loss, atol=1e-6)


def test_value_targets_are_monte_carlo_returns_at_lambda_one():
    np.testing.assert_allclose(value_targets(EXAMPLE)[0, 0], [1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(value_targets(EXAMPLE, lambda_critic=0.0)[0, 0], [0.6, 0.8, 1], rtol=1e-6)
    with pytest.raises(ValueError, match="'values'"):
        value_targets(EXAMPLE.replace(extras={}))


def test_against_a_loop_over_the_real_tokens():
    rng = np.random.default_rng(0)
    shape = (2, 3, 7)
    mask, valid = rng.random(shape) < 0.6, np.array([[1, 1, 0], [1, 1, 1]], bool)
    mask[0, 1] = False
    rewards, values, kl = rng.normal(size=(2, 3)), rng.normal(size=shape), rng.normal(size=shape)
    rollouts = Rollouts(
        mask=jnp.asarray(mask), valid=jnp.asarray(valid), rewards=jnp.float32(rewards),
        old_logprobs=jnp.float32(np.where(mask, kl, np.nan)), ref_logprobs=jnp.zeros(shape),
        extras={"values": jnp.float32(np.where(mask, values, np.inf))})
    gamma, alpha, coef = 0.9, 0.8, 0.2
    expected, targets = np.zeros(shape), np.zeros(shape)
    for p, g in zip(*np.nonzero(valid)):
        real = np.flatnonzero(mask[p, g])
        lam = max(0.0, 1 - 1 / (alpha * max(len(real), 1)))
        for store, weight in ((expected, lam), (targets, 0.7)):
            advantage = following = 0.0
            for t in real[::-1]:
                reward = (rewards[p, g] if t == real[-1] else 0) - coef * kl[p, g, t]
                delta = reward + gamma * following - values[p, g, t]
                advantage, following = delta + gamma * weight * advantage, values[p, g, t]
                store[p, g, t] = advantage + (values[p, g, t] if store is targets else 0)
    actual, _ = advantages.make("ppo_gae", gamma=gamma, length_alpha=alpha, kl_coef=coef, whiten=False).update(rollouts, ())
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    actual = value_targets(rollouts, gamma=gamma, lambda_critic=0.7, kl_coef=coef)
    np.testing.assert_allclose(actual, targets, atol=2e-6)

    whitened, _ = advantages.make("ppo_gae", gamma=gamma, length_alpha=alpha, kl_coef=coef).update(rollouts, ())
    kept = expected[mask & valid[..., None]]
    scaled = (expected - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whitened, np.where(mask & valid[..., None], scaled, 0), atol=5e-6)


def test_an_impossible_alpha_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        advantages.make("ppo_gae", length_alpha=0.0)

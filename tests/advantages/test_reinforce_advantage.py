"""The REINFORCE family on one example by hand, REINFORCE++ against a float64 loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists

EXAMPLE = from_lists([[1, 0]], lengths=[[3, 1]])


def run(rollouts, **hyper):
    estimator = advantages.reinforce(**hyper)
    values, state = estimator.update(rollouts, estimator.init())
    return np.asarray(values), state


def rows(first, second):
    return [[[first] * 3, [second, 0, 0]]]


def test_plain_and_batch_mean():
    assert np.array_equal(run(EXAMPLE)[0], rows(1, 0))
    assert np.array_equal(run(EXAMPLE, variant="batch_mean")[0], rows(0.5, -0.5))


def test_moving_average_uses_the_old_value_and_then_moves():
    values, state = run(EXAMPLE, variant="ema", ema_init=0.4)
    np.testing.assert_allclose(values, rows(0.6, -0.4), rtol=1e-6)
    np.testing.assert_allclose(state, 0.405, rtol=1e-6)
    _, unmoved = run(EXAMPLE.replace(valid=jnp.zeros((1, 2), bool)), variant="ema", ema_init=0.4)
    assert unmoved == jnp.float32(0.4)


def test_rewards_of_other_policies_move_no_average():
    """A pool's group is trained on, and the moving average stays that of the policy."""
    mixed = from_lists([[1, 0], [1, 1]]).replace(extras={"replayed": np.array([[False, False], [True, True]])})
    values, state = run(mixed, variant="ema", ema_init=0.4)
    np.testing.assert_allclose(state, 0.405, rtol=1e-6)
    np.testing.assert_allclose(values[1, :, 0], [0.6, 0.6], rtol=1e-6)


@pytest.mark.parametrize("variant", ["rfpp", "rfpp_baseline"])
def test_whitening_counts_tokens(variant):
    np.testing.assert_allclose(run(EXAMPLE, variant=variant)[0], rows(0.49999999, -1.49999997), atol=1e-7)


def test_an_all_equal_group_is_not_neutral_under_global_whitening():
    values, _ = run(from_lists([[1, 0], [1, 1]], lengths=[[3, 1], [2, 2]]), variant="rfpp_baseline")
    np.testing.assert_allclose(values[0], [[1.06066013] * 3, [-1.76776688, 0, 0]], atol=2e-7)
    np.testing.assert_allclose(values[1, :, :2], -0.35355338, atol=1e-7)


def test_population_variance_and_singletons():
    values, _ = run(EXAMPLE, variant="rfpp", unbiased=False)
    np.testing.assert_allclose(values, rows(0.25 / np.sqrt(3 / 16), -0.75 / np.sqrt(3 / 16)), rtol=1e-6)
    lone = from_lists([[2.0], [5.0]])
    assert not np.any(run(lone, variant="rfpp_baseline")[0])
    raw, _ = run(lone, variant="rfpp_baseline", singleton="raw")
    np.testing.assert_allclose(raw[:, 0, 0], [-(0.5**0.5), 0.5**0.5], rtol=1e-6)


def test_reinforce_pp_with_kl_discount_and_tool_output_in_the_middle():
    rng = np.random.default_rng(0)
    mask = np.array([[[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0]]], bool)
    kl = rng.normal(size=mask.shape)
    rewards = np.array([[1.0, 0.25, -1.0]])
    rollouts = from_lists(rewards.tolist(), lengths=[[5, 5, 5]]).replace(
        mask=jnp.asarray(mask), old_logprobs=jnp.asarray(kl, jnp.float32), ref_logprobs=jnp.zeros(mask.shape))
    values, _ = run(rollouts, variant="rfpp", gamma=0.9, kl_coef=0.1)

    returns = np.zeros(mask.shape)
    for g in range(3):
        following = 0.0
        real = np.flatnonzero(mask[0, g])
        for t in real[::-1]:
            following = (rewards[0, g] if t == real[-1] else 0) - 0.1 * kl[0, g, t] + 0.9 * following
            returns[0, g, t] = following
    kept = returns[mask]
    expected = np.where(mask, (returns - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0)
    np.testing.assert_allclose(values, expected, atol=2e-6)


def test_a_missing_reference_is_named():
    with pytest.raises(ValueError, match="'old_logprobs'"):
        run(EXAMPLE, variant="rfpp", kl_coef=0.1)

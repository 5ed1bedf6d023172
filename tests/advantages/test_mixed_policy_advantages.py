"""Advantages of groups with expert traces, retries or replayed rollouts, against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists


def values(slug, rewards, extras=None, **hyper):
    rollouts = from_lists(rewards, extras={} if extras is None else extras)
    return np.asarray(advantages.make(slug, **hyper).update(rollouts, ())[0])[..., 0]


EXPERT = np.array([[True, False, False, False]])


def test_luffy_baselines():
    close = np.testing.assert_allclose
    close(values("luffy", [[1, 0, 0, 0.5]]), [[0.625, -0.375, -0.375, 0.125]], atol=1e-7)
    extras = {"expert": EXPERT}
    close(values("luffy", [[1, 0, 0, 0.5]], extras, baseline="on_policy"), [[5 / 6, -1 / 6, -1 / 6, 1 / 3]], atol=1e-6)
    scaled = values("luffy", [[1, 0, 0, 0.5]], extras, baseline="on_policy", use_std=True)
    close(scaled, np.array([[5 / 6, -1 / 6, -1 / 6, 1 / 3]]) / (np.sqrt(1 / 12) + 1e-6), rtol=1e-5)


def test_luffy_edges():
    extras = {"expert": EXPERT}
    assert not np.any(values("luffy", [[0.3] * 4], extras))
    # all of the policy's rollouts fail: their deviation 0 counts as 1, and only the expert's advantage is not 0
    failed = values("luffy", [[1, 0, 0, 0]], extras, baseline="on_policy", use_std=True)
    np.testing.assert_allclose(failed, [[1, 0, 0, 0]], atol=2e-6)
    assert values("luffy", [[0.7]]) == np.float32(0.7)
    # one rollout of the policy's own: no baseline, raw rewards
    two = values("luffy", [[1, 0.5]], {"expert": np.array([[True, False]])}, baseline="on_policy")
    np.testing.assert_allclose(two, [[1, 0.5]])


def test_a_forced_prefix_makes_the_rollout_the_experts():
    prefix = np.zeros((1, 4, 2), bool)
    prefix[0, 0, 0] = True
    rollouts = from_lists([[1, 0, 0, 0.5]], lengths=[[2, 1, 1, 2]])
    results = [advantages.make("luffy", baseline="on_policy").update(rollouts.replace(extras={"expert": jnp.asarray(x)}), ())[0]
               for x in (prefix, EXPERT)]
    np.testing.assert_array_equal(*results)


def test_oapl_value_is_a_soft_maximum():
    rewards = [[1, 0, 0, 1], [0.2, 0.9, 0.4, 0.1]]
    for beta in (0.01, 0.5, 1.0, 1000.0):
        r = np.array(rewards)
        expected = r - beta * np.log(np.mean(np.exp(r / beta), axis=1, keepdims=True))
        np.testing.assert_allclose(values("karl_oapl", rewards, beta1=beta), expected, atol=1e-4 if beta > 1 else 2e-6)
    expected = [0.379885, -0.620115, -0.620115, 0.379885]
    np.testing.assert_allclose(values("karl_oapl", [[1, 0, 0, 1]])[0], expected, atol=1e-6)
    assert not np.any(values("karl_oapl", [[0.3] * 5], beta1=0.07)) and values("karl_oapl", [[3.0]]) == 0
    np.testing.assert_allclose(values("karl_oapl", [[500.0, 0.0]], beta1=1.0)[0], [0.693147, -499.306853], rtol=1e-5)


def test_oapl_ignores_invalid_rollouts():
    padded = values("karl_oapl", [[1, 0], [0.5, 0.5, 0.2]])
    np.testing.assert_allclose(padded[0, :2], values("karl_oapl", [[1, 0]])[0], rtol=1e-6)


@pytest.mark.parametrize("baseline", ["mean", "soft"])
def test_r3l_against_a_loop(baseline):
    rng = np.random.default_rng(0)
    rewards = [list(rng.choice([0, 0.3, 0.6, 1.0, 1.5], n)) for n in (4, 1, 6, 2, 8)]
    with jax.enable_x64(True):
        actual = values("r3l", rewards, alpha=2.0, baseline=baseline, tau=0.5)
    for row, group in zip(actual, rewards):
        b = np.mean(group) if baseline == "mean" else 0.5 * np.log(np.mean(np.exp(np.array(group) / 0.5)))
        b = 0 if len(group) == 1 else b
        expected = [1.0 if r >= 1 else 2 * (r - b) if r >= b else r - b for r in group]
        np.testing.assert_allclose(row[: len(group)], expected, rtol=1e-6, atol=1e-6)


def test_r3l_edges():
    np.testing.assert_allclose(values("r3l", [[0, 1, 0.5, 0.6]])[0], [-0.525, 1, -0.025, 0.225], atol=1e-6)
    assert np.all(values("r3l", [[1, 1, 1]]) == 1)  # a group that succeeds is still reinforced
    assert not np.any(values("r3l", [[0.1] * 7]))
    np.testing.assert_allclose(values("r3l", [[0.4]]), [[1.2]], rtol=1e-6)


def test_sil_keeps_only_rollouts_above_their_value():
    rollouts = from_lists([[0, 0]], lengths=[[3, 1]])
    extras = {"returns": jnp.array([[[1.0, 0.2, 2.0], [1, 5, 5]]]),
              "values": jnp.array([[[0.4, 0.5, 0.3], [0.5, 0, 0]]])}
    actual, _ = advantages.make("sil").update(rollouts.replace(extras=extras), ())
    np.testing.assert_allclose(actual, [[[0.6, 0, 1], [0.5, 0, 0]]], atol=1e-6)


def test_an_invalid_temperature_is_refused():
    with pytest.raises(ValueError, match="beta1=0"):
        advantages.make("karl_oapl", beta1=0)
    with pytest.raises(ValueError, match="extras\\['expert'\\]"):
        values("luffy", [[1, 0]], baseline="on_policy")

"""Estimators of the covariance, divergence and off-policy REINFORCE family."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods
from jaxrl_llm.advantages.t1 import repeated_share
from jaxrl_llm.data.rollouts import from_lists, pad_lists

ENTROPIES = pad_lists([[[0.9, 1.4, 0.3], [0.6, 1.8]]])


def qwen(rollouts, state=None, **hyper):
    estimator = advantages.make("qwenlong_aepo", **{"scope": "batch", "entropy_low": 0.5, "entropy_high": 0.9} | hyper)
    values, state = estimator.update(rollouts, estimator.init() if state is None else state)
    return np.asarray(values), state


def test_qwenlong_example():
    rollouts = from_lists([[1, 0]], lengths=[[3, 2]], entropies=ENTROPIES)
    values, on = qwen(rollouts)
    np.testing.assert_allclose(values, [[[0.999998] * 3, [0] * 3]], rtol=1e-6)  # mean entropy 1.0333 > 0.9
    assert not on
    values, _ = qwen(rollouts, gate="token", entropy_high=1.0)
    np.testing.assert_allclose(values, [[[0.999998] * 3, [-0.999998, 0, 0]]], rtol=1e-6)
    values, _ = qwen(rollouts, gate="sequence", entropy_high=1.0)
    assert np.all(values[0, 1] == 0) and np.all(values[0, 0] > 0)
    with pytest.raises(ValueError, match="entropy_low=0.5 must not exceed"):
        advantages.make("qwenlong_aepo", entropy_low=0.5, entropy_high=0.2)


def test_qwenlong_from_reward_to_loss():
    estimator, objective = methods.build("qwenlong_aepo", estimator="entropy_low=0.5, entropy_high=0.9")
    old, new = (np.log(pad_lists([rows], fill=1.0)) for rows in (
        [[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]]))
    rollouts = from_lists([[1, 0]], lengths=[[3, 2]], entropies=ENTROPIES, old_logprobs=old)
    values, _ = estimator.update(rollouts, estimator.init())
    loss, gradient = jax.value_and_grad(lambda lp: objective.update(lp, rollouts, values, ())[0])(jnp.asarray(new))
    np.testing.assert_allclose(loss, -0.619998760, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[[-0.299999, -0.22, -0.1], [0, 0, 0]]], atol=1e-6)
    values, _ = qwen(rollouts, gate="token", entropy_high=1.0)
    loss, _ = objective.update(jnp.asarray(new), rollouts, jnp.asarray(values), ())
    np.testing.assert_allclose(loss, -0.519998960, rtol=1e-6)


def test_qwenlong_switch_has_hysteresis():
    state = None
    for entropy, on in ((0.7, True), (0.95, False), (0.7, False), (0.5, False), (0.45, True), (0.9, True)):
        rollouts = from_lists([[1, 0]], entropies=np.full((1, 2, 1), entropy, np.float32))
        values, state = qwen(rollouts, state)
        assert bool(state) == on and (values[0, 1, 0] < 0) == on and values[0, 0, 0] > 0
    empty = rollouts.replace(valid=jnp.zeros((1, 2), bool))
    assert not qwen(empty, jnp.asarray(False))[1] and qwen(empty, jnp.asarray(True))[1]


def test_qwenlong_scale_is_that_of_the_task():
    rewards = [[1, 0], [1, 1], [0.2, 0.4]]
    rollouts = from_lists(rewards, entropies=np.zeros((3, 2, 1), np.float32), extras={"task": np.array([7, 7, 3])})
    values, _ = qwen(rollouts, scope="task")
    same = np.std([1, 0, 1, 1])
    expected = [[0.5 / (same + 1e-6), -0.5 / (same + 1e-6)], [0, 0], [-0.1 / (0.1 + 1e-6), 0.1 / (0.1 + 1e-6)]]
    np.testing.assert_allclose(values[..., 0], expected, rtol=1e-5)
    values, _ = qwen(rollouts)
    np.testing.assert_allclose(values[0, 0, 0], 0.5 / (np.std(rewards) + 1e-6), rtol=1e-5)
    with pytest.raises(ValueError, match=r"extras\['task'\]"):
        qwen(rollouts.replace(extras={}), scope="task")


def kimi(rewards, **hyper):
    return np.asarray(advantages.make("kimi_opmd", **hyper).update(from_lists(rewards), ())[0])[..., 0]


def test_kimi_baselines_and_their_limits():
    rewards = [[1, 0, 0.5], [0.2, 0.9]]
    for tau in (0.1, 1.0):
        expected = [np.array(row) - tau * np.log(np.mean(np.exp(np.array(row) / tau))) for row in rewards]
        actual = kimi(rewards, baseline="logavgexp", tau=tau)
        np.testing.assert_allclose(actual[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(actual[1, :2], expected[1], atol=1e-6)
    np.testing.assert_allclose(kimi(rewards, baseline="logavgexp", tau=1e3), kimi(rewards), atol=1e-3)
    np.testing.assert_allclose(kimi(rewards, baseline="logavgexp", tau=1e-3)[0], [0, -1, -0.5], atol=2e-3)
    assert not kimi([[0.3] * 5], baseline="logavgexp", tau=0.5).any()  # equal rewards: exactly 0
    assert kimi([[0.7]]) == np.float32(0.7) and kimi([[0.7]], baseline="logavgexp") == np.float32(0.7)


def test_kimi_length_reward():
    """The worked example with lengths 1, 2, 1, 3: rewards [1.5, 1, 0, -0.5] of mean 0.5."""
    mask = np.arange(3) < np.array([1, 2, 1, 3])[None, :, None]
    rollouts = from_lists([[1, 1, 0, 0]]).replace(mask=mask)
    values, _ = advantages.make("kimi_opmd", length_weight=1.0).update(rollouts, ())
    np.testing.assert_allclose(values, np.array([1, 0.5, -0.5, -1])[None, :, None] * mask, atol=1e-6)


def test_kimi_length_reward_after_the_warmup():
    mask = np.arange(3) < np.array([1, 2, 1, 3])[None, :, None]
    rollouts = from_lists([[1, 1, 0, 0]]).replace(mask=mask)
    one = advantages.make("kimi_opmd", length_weight=1.0, length_warmup=2)
    seen, state = [], one.init()
    for _ in range(3):
        values, state = one.update(rollouts, state)
        seen.append(values[0, :, 0])
    np.testing.assert_allclose(seen, [[0.5, 0.5, -0.5, -0.5]] * 2 + [[1, 0.5, -0.5, -1]], atol=1e-6)
    with pytest.raises(ValueError, match="length_warmup=-1 batches"):
        advantages.make("kimi_opmd", length_warmup=-1)


def rec(rewards, state=0, **hyper):
    return np.asarray(advantages.make("rec_family", **hyper).update(from_lists(rewards), jnp.int32(state))[0])[..., 0]


def test_rec_family_example():
    np.testing.assert_allclose(rec([[1, 0, 0, 0]], scale=True), [[1.732047] + [-0.577349] * 3], rtol=1e-6)
    np.testing.assert_allclose(rec([[1, 0, 0, 0]]), [[0.75, -0.25, -0.25, -0.25]], rtol=1e-6)
    assert rec([[0.7]]) == np.float32(0.7)
    np.testing.assert_allclose(rec([[0.7]], scale=True), 0.7 / (1 + 1e-6), rtol=1e-6)


@pytest.mark.slow
def test_red_drop_keeps_as_many_wrong_as_right():
    seen = {tuple(rec([[1, 0, 0, 0]], state, drop="balance")[0].tolist()) for state in range(24)}
    assert seen == {(0.5, -0.5, 0, 0), (0.5, 0, -0.5, 0), (0.5, 0, 0, -0.5)}
    values = rec([[1, 0.9, 0.1, 0, 0, 0], [1, 1, 0, 1]], drop="balance")
    kept = [r for r, a in zip([1, 0.9, 0.1, 0, 0, 0], values[0]) if a != 0]
    assert len(kept) == 4 and {1, 0.9} <= set(kept)  # no kept reward equals the mean, so 0 means dropped
    np.testing.assert_allclose(values[0][values[0] != 0], np.array(kept) - np.mean(kept), rtol=1e-5)
    np.testing.assert_allclose(values[1, :4], [0.25, 0.25, -0.75, 0.25], rtol=1e-6)  # few wrong rollouts: none dropped
    assert not np.any(rec([[0.3] * 5], drop="balance"))
    low, *middle, high = rec([[0.1, 0.2, 0.2, 0.3]], drop="balance")[0].tolist()  # the mean is 0.2, in float32 a little more
    assert low == pytest.approx(-high, rel=1e-4) and high > 0.09 and middle == pytest.approx([0, 0], abs=1e-5)


def test_topr_shift():
    values = advantages.make("topr", shift=0.5).update(from_lists([[1, 0, 0.5]]), ())[0]
    np.testing.assert_array_equal(np.asarray(values)[..., 0], [[0.5, -0.5, 0]])


def test_t1_punishes_repetition():
    tokens = jnp.array([[[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 0, 0]]])
    lengths = [[6, 6, 4]]
    rollouts = from_lists([[1, 1, 0]], lengths=lengths, tokens=tokens)
    share = repeated_share(tokens, rollouts.mask, n=2)
    np.testing.assert_allclose(share, [[0.6, 0, 2 / 3]], rtol=1e-6)
    values = advantages.make("t1").update(rollouts, ())[0]
    np.testing.assert_allclose(np.asarray(values)[0, :, 0], [0 - (1 - 1) / 2, 1 - (0 - 1) / 2, -1 - 0.5], atol=1e-6)
    values = advantages.make("t1", threshold=0.6).update(rollouts, ())[0]
    np.testing.assert_allclose(np.asarray(values)[0, :, 0], [1 - 0, 1 - 0, -1 - 1], atol=1e-6)  # .6 is not above .6


def test_repeated_share_against_sets():
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 3, (2, 4, 9)), rng.random((2, 4, 9)) < 0.8
    for n in (1, 2, 3):
        actual = repeated_share(jnp.asarray(tokens), jnp.asarray(mask), n=n)
        for p, g in itertools.product(range(2), range(4)):
            grams = [tuple(tokens[p, g, t:t + n]) for t in range(9 - n + 1) if mask[p, g, t:t + n].all()]
            expected = 1 - len(set(grams)) / len(grams) if grams else 0
            np.testing.assert_allclose(actual[p, g], expected, atol=1e-6)
    assert not np.any(repeated_share(jnp.asarray(tokens), jnp.asarray(mask), n=10))

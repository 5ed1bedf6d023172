"""Single-rollout RL: literal numbers, the tracker over several steps in float64, forgetting, the entropy bonus."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.mssr import retention
from jaxrl_llm.data.rollouts import Rollouts

close = np.testing.assert_allclose


def single(ids, rewards, kls, entropies):
    """One rollout per prompt; the k3 estimate of the KL to the reference is `kls[b]` on each of its tokens."""
    d = np.sqrt(2 * np.asarray(kls, np.float64))  # exp(d) - d - 1 = kl, by Newton
    for _ in range(50):
        d = d - (np.exp(d) - d - 1 - kls) / np.where(d == 0, 1, np.expm1(d))
    H = jnp.asarray(entropies, jnp.float32)[:, None]
    old = jnp.full(H.shape, -1.0)
    return Rollouts(
        mask=jnp.ones(H.shape, bool), valid=jnp.ones((len(ids), 1), bool), rewards=jnp.asarray(rewards)[:, None] * 1.0,
        prompt_ids=jnp.asarray(ids), entropies=H, old_logprobs=old,
        ref_logprobs=old + jnp.asarray(d, jnp.float32)[:, None, None])


@pytest.mark.slow
def test_worked_example():
    estimator = advantages.make("mssr", num_prompts=3)
    start = estimator.init()._replace(
        ids=jnp.array([0, 1, -1]), successes=jnp.array([4.0, 6, 0]), failures=jnp.array([4.0, 2, 0]))
    rollouts = single([0, 1, 2], [1, 0, 1], [0.002, 0.004, 0.006], [[0.5, 2], [0.5, 2], [0, 1]])
    A, state = estimator.update(rollouts, start)
    close(A[:, 0], [[0.9071068, 1.0606602], [-1.2142136, -0.7071068], [0.7071068, 1.0606602]], rtol=1e-6)
    close(state.successes, [4.636, 5.454, 4.636], rtol=1e-5)
    close(state.failures, [3.636, 2.818, 3.636], rtol=1e-5)
    assert state.steps == 1 and state.ids.tolist() == [0, 1, 2]
    vanilla, _ = advantages.make("mssr", num_prompts=3, entropy_coef=0.0).update(rollouts, start)
    close(vanilla[:, 0, 0], [0.7071068, -1.4142136, 0.7071068], rtol=1e-6)


@pytest.mark.slow
def test_several_steps_agree_with_numpy():
    """Prompts repeat inside a batch, the KL window wraps round, and two prompts (0 and 5) share a place."""
    rng, N, window = np.random.default_rng(0), 5, 3
    estimator = advantages.make("mssr", num_prompts=N, kl_window=window, v_init=0.3)
    state, counts, kls, shared = estimator.init(), {}, [], set()
    for _ in range(8):
        ids, won = rng.integers(0, N + 1, 4), rng.integers(0, 2, 4)
        kl, H = rng.uniform(0, 0.02, 4), rng.exponential(size=(4, 2))
        A, state = estimator.update(single(ids, won, kl, H), state)

        rate = {i: a / (a + b) for i, a, b in counts.values()}
        surprise = won - np.array([rate.get(i, 0.3) for i in ids])
        white = (surprise - surprise.mean()) / np.sqrt(max(surprise.var(), 1e-6))
        close(A[:, 0], white[:, None] + np.minimum(np.abs(white)[:, None] / 2, 0.4 * H), rtol=1e-3, atol=1e-5)
        kls = (kls + [kl.mean()])[-window:]
        m = np.mean(kls)
        rho = 0.875 if m > 0.01 else 0.875 + m / 0.01 * 0.085
        for i, o in zip(ids, won):
            owner, a, b = counts.get(i % N, (None, 0, 0))
            a, b = (a, b) if owner == i else (8 * 0.3, 8 * 0.7)
            counts[i % N] = i, rho * a + o, rho * b + 1 - o
            shared.add(i)
    assert {0, 5} <= shared
    expected = [counts.get(i, (-1, 0, 0)) for i in range(N)]
    close(np.stack([state.ids, state.successes, state.failures], 1), expected, rtol=1e-3)


def test_retention_rules():
    kl = jnp.array([0.0, 0.005, 0.01, 0.02])
    hyper = {"target": 0.01, "rho_min": 0.875, "rho_max": 0.96}
    close(retention(kl, rule="code", **hyper), [0.875, 0.9175, 0.96, 0.875], rtol=1e-6)
    close(retention(kl, rule="monotone", **hyper), [0.96, 0.9175, 0.875, 0.875], rtol=1e-6)


def test_a_batch_of_one_keeps_its_raw_advantage():
    estimator = advantages.make("mssr", num_prompts=2)
    A, _ = estimator.update(single([1], [1], [0.0], [[0.0, 9.0]]), estimator.init())
    close(A[0, 0], [0.5, 0.75])


@pytest.mark.slow
def test_the_bonus_weakens_penalties_by_at_most_the_cap():
    rollouts = single([0, 1], [0, 1], [0.0, 0.0], [[100.0], [100.0]])
    mssr = advantages.make("mssr", num_prompts=2, entropy_cap=4.0)
    A, _ = mssr.update(rollouts, mssr.init())
    close(A[:, 0, 0], [-0.75, 1.25])


def test_sampled_entropy_is_minus_p_log_p():
    rollouts = single([0, 1], [0, 1], [0.0, 0.0], [[100.0], [100.0]]).replace(entropies=None)
    estimator = advantages.make("mssr", num_prompts=2, entropy="sampled")
    close(estimator.update(rollouts, estimator.init())[0][:, 0, 0], np.array([-1, 1]) + 0.4 * np.exp(-1), rtol=1e-6)
    with pytest.raises(ValueError, match="entropies"):
        advantages.make("mssr", num_prompts=2).update(rollouts, estimator.init())


def test_a_batch_without_rollouts_does_not_change_the_tracker():
    estimator = advantages.make("mssr", num_prompts=2)
    rollouts = single([0, 1], [0, 1], [0.5, 0.5], [[1.0], [1.0]])
    _, state = estimator.update(rollouts.replace(valid=jnp.zeros((2, 1), bool)), estimator.init())
    assert state.steps == 0 and not np.any(state.successes) and not np.any(state.kls)

"""Dropped and kept rollouts: literal numbers, brute force, and exact denominators after a filter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.control import pass_rate
from jaxrl_llm.control.d3s import down_sample, max_variance_subset
from jaxrl_llm.control.rstar2_roc import kept_counts, mess_penalty, resample_on_correct
from jaxrl_llm.data.rollouts import from_lists

close = np.testing.assert_allclose


# D3S


@pytest.mark.slow
def test_d3s_worked_example():
    A = jnp.array([[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]])
    H = jnp.arange(16.0).reshape(2, 4, 2) / 10
    rollouts, tokens = down_sample(A, H, jnp.ones((2, 4, 2), bool), rollout_share=0.5, token_share=0.5)
    assert np.array_equal(rollouts, [[1, 1, 0, 0], [0, 0, 1, 1]])
    assert np.var(A[rollouts]) == 1.25
    assert np.array_equal(tokens, [[[0, 0]] * 4, [[0, 0], [0, 0], [1, 1], [1, 1]]])


def test_d3s_subset_has_the_largest_variance_of_all():
    rng = np.random.default_rng(0)
    subset = jax.jit(max_variance_subset)
    for n in range(1, 8):
        x, real = rng.normal(size=9), np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
        keep = np.asarray(subset(jnp.asarray(x, jnp.float32), jnp.asarray(real), n / 7))
        assert keep.sum() == n and not np.any(keep & ~real)
        best = max(np.var(x[list(chosen)]) for chosen in itertools.combinations(np.flatnonzero(real), n))
        close(np.var(x[keep]), best, rtol=1e-5)


@pytest.mark.slow
def test_d3s_groups_are_sampled_on_their_own_and_at_least_one_rollout_stays():
    A, mask = jnp.array([[9.0, -9, 0, 0], [1, -1, 0, 0]]), jnp.ones((2, 4, 1), bool)
    H = jnp.ones((2, 4, 1))
    across, _ = down_sample(A, H, mask, rollout_share=0.25, token_share=1.0)
    within, _ = down_sample(A, H, mask, rollout_share=0.5, token_share=1.0, scope="group")
    assert np.array_equal(across, [[1, 1, 0, 0], [0, 0, 0, 0]])
    assert np.array_equal(within, [[1, 1, 0, 0]] * 2)
    least, token = down_sample(A, H, mask, rollout_share=0.0, token_share=0.0)
    assert np.sum(least) == 1 and np.sum(token) == 1


@pytest.mark.slow
def test_d3s_estimator_relaxes_and_its_token_mean_is_over_the_kept_tokens():
    rng = np.random.default_rng(1)
    rollouts = from_lists(rng.normal(size=(3, 4)), rng.integers(1, 4, (3, 4)))
    mask = rollouts.mask
    rollouts = rollouts.replace(entropies=jnp.asarray(rng.exponential(size=mask.shape)),
                                old_logprobs=jnp.asarray(rng.normal(size=mask.shape)))
    logprobs = jnp.asarray(rng.normal(size=mask.shape))
    estimator, objective = advantages.make("d3s", total_steps=2, tokens_init=0.5), objectives.ppo_clip()
    plain, _ = advantages.grpo().update(rollouts, ())
    shares, state = [], estimator.init()
    for _ in range(3):
        A, state = estimator.update(rollouts, state)
        kept = A != 0
        shares.append(int(kept.sum()))
        loss, _ = objective.update(logprobs, rollouts, A, ())
        expected, _ = objective.update(logprobs, rollouts.replace(mask=kept), plain, ())
        close(loss, expected, rtol=1e-5)
    assert shares[0] < shares[1] < shares[2] == mask.sum()
    close(A, plain, rtol=1e-6)
    with pytest.raises(ValueError, match="total_steps=0"):
        advantages.make("d3s", total_steps=0)


# Resample on correct


ROC = {
    "tool_calls": [2, 0, 4, 1, 1, 2, 0, 1],
    "error_words": [1, 0, 0, 0, 1, 0, 0, 0],
    "answer_blocks": [1, 1, 3, 1, 0, 1, 1, 0],
    "turns": [3, 1, 5, 2, 2, 3, 1, 2],
    "malformed": [False] * 8,
}
REWARDS = [[1, 1, 1, 0, 0, 1, 0, 1]]


def test_roc_worked_example():
    extras = {name: jnp.asarray([row]) for name, row in ROC.items()}
    close(mess_penalty(**extras), [[0.5, 0.5, 0.4, 0, 2, 0, 0.5, 1]])
    rollouts = from_lists(REWARDS, [[1, 2, 3, 4, 1, 2, 3, 4]]).replace(extras=extras)
    A, _ = advantages.make("rstar2_roc", train_rollouts=4, min_negative=1, min_positive=1).update(rollouts, ())
    scale = 20 / (3 + 4 + 1 + 2)  # all tokens over the tokens of the kept rollouts
    close(A[0, :, 0], scale * 0.866024 * np.array([0, 0, 1, -1, -1, 1, 0, 0]), rtol=1e-5)


def test_roc_penalises_broken_format_fully():
    penalty = mess_penalty(jnp.full(4, 1), jnp.zeros(4), jnp.array([1, 0, 9, 1]), jnp.array([2, 2, 2, 0]),
                           jnp.array([True, False, False, False]))
    close(penalty, [1, 1, 1, 1])


@pytest.mark.parametrize("negatives, positives, expected", [
    (16, 16, (8, 8)), (31, 1, (15, 1)), (1, 31, (1, 15)), (30, 2, (14, 2)), (2, 30, (2, 14)), (4, 28, (2, 14)),
    (5, 27, (2, 14)), (3, 4, (3, 4)), (0, 32, (0, 16)),
])
def test_roc_counts(negatives, positives, expected):
    """Half of 32 in proportion (2.5 rounds to 2), but at least two of each kind that has two."""
    counts = kept_counts(jnp.array(negatives), jnp.array(positives), 16, min_negative=2, min_positive=2)
    assert tuple(int(k) for k in counts) == expected


def test_roc_drops_groups_without_disagreement_and_padding():
    rewards, penalty = jnp.array([[1.0, 1, 1, 1], [0, 1, 1, 1]]), jnp.array([[0.0] * 4, [0, 3, 0, 1]])
    valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)
    keep = resample_on_correct(rewards, valid, penalty, size=2, min_negative=1, min_positive=1)
    assert np.array_equal(keep, [[0, 0, 0, 0], [1, 0, 0, 1]])
    with pytest.raises(ValueError, match="do not fit into train_rollouts=3"):
        advantages.make("rstar2_roc", train_rollouts=3)


@pytest.mark.slow
def test_roc_of_the_paper_draws_clean_positives_more_often():
    """One of two positives, penalties 0.25 and 0.75: the first in three quarters of the draws; negatives evenly."""
    P = 4000
    rewards, penalty = jnp.tile(jnp.array([1.0, 1, 0, 0]), (P, 1)), jnp.tile(jnp.array([0.25, 0.75, 0, 9]), (P, 1))
    keep = resample_on_correct(rewards, jnp.ones((P, 4), bool), penalty, size=2, min_negative=1, min_positive=1,
                               key=jax.random.key(0))
    assert np.all(np.sum(keep, 1) == 2)
    close(np.mean(keep, 0), [0.75, 0.25, 0.5, 0.5], atol=0.03)


# Solved prompts


def test_unsolved_keeps_untried_prompts_and_enough_of_them():
    rates = jnp.array([0.5, 0.95, np.nan, 0.9])
    assert np.array_equal(pass_rate.unsolved(rates), [1, 0, 1, 0])
    assert np.array_equal(pass_rate.unsolved(rates, at_least=3), [1, 0, 1, 1])
    assert np.array_equal(~pass_rate.unsolved(jnp.array([0.25, 0, 0, 1])), [0, 0, 0, 1])

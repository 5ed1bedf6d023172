"""Baselines by length and shares of groups with a signal: literal numbers, and what peers compute on a random batch."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists

P, G, T = 4, 5, 6
REWARD_BASELINES = np.array([0.5, 0, 1, 0.5])


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def first(slug, rollouts, **hyper):
    """[P, G], the advantage of the first token of each rollout."""
    return np.asarray(advantages.make(slug, **hyper).update(rollouts, ())[0])[..., 0]


def test_opo_worked_example():
    """(2 x 1 + 3 x 0 + 5 x 0.4) / 10 = 0.4; equal rewards; (1 x 3 - 3 x 4/3) / 4 = -0.25; one rollout alone."""
    rollouts = from_lists([[1, 0, 0.4], [0.7, 0.7, 0.7], [3, -4 / 3], [2]], [[2, 3, 5], [1, 7, 4], [1, 3], [4]])
    wanted = [[0.6, -0.4, 0], [0, 0, 0], [3.25, -13 / 12, 0], [0, 0, 0]]
    np.testing.assert_allclose(first("opo", rollouts), wanted, atol=1e-6)
    np.testing.assert_allclose(first("opo", rollouts, singleton="raw"), [*wanted[:3], [2, 0, 0]], atol=1e-6)


def test_gpg_worked_example():
    """Seven rollouts, of which two groups with five have unequal rewards: 7 / 5; four rewards are not 0: 7 / 4."""
    rollouts = from_lists([[1, 0, 0.5], [0, 0], [1, 0.5]])
    for rescale, alpha in (("signal", 7 / 5), ("rewarded", 7 / 4), ("none", 1)):
        wanted = [[0.5 * alpha, -0.5 * alpha, 0], [0, 0, 0], [0.25 * alpha, -0.25 * alpha, 0]]
        np.testing.assert_allclose(first("gpg", rollouts, rescale=rescale), wanted, atol=1e-6)
    assert not first("gpg", from_lists([[1, 1], [0, 0]])).any()  # no group has a signal


def test_remax_worked_example():
    """The greedy completion of the second prompt was lost."""
    rollouts = from_lists([[1, 0, 0.25], [1, 0]], [[1, 2, 1], [1, 1]], extras={"greedy_rewards": jnp.array([0.5, np.nan])})
    made, _ = advantages.make("remax").update(rollouts, ())
    np.testing.assert_allclose(made, pad_lists([[[0.5], [-0.5, -0.5], [-0.25]], [[0], [0], [0]]]), atol=1e-6)


def test_optimal_token_baseline_worked_example():
    """Energies of 1/2, 1/4, 1/4 at the first token: B = (1/2 + 1/8) / 1; of 1 and 1/2 at the second: B = (1/4) / (3/2)."""
    energies = pad_lists([[[0.5], [0.25, 0.75], [0.25, 0.25, 1]], [[0], [0, 0]], [[1, 1]]], np.nan)
    rollouts = from_lists([[1, 0, 0.5], [1, 0], [2]], [[1, 2, 3], [1, 2], [2]], extras={"logit_gradients": energies})
    made = [np.asarray(advantages.make("optimal_token_baseline", alone=alone).update(rollouts, ())[0])
            for alone in ("zero", "raw")]
    wanted = pad_lists([[[0.375], [-0.625, -1 / 6], [-0.125, 1 / 3, 0]], [[0.5], [-0.5, 0]], [[0, 0]]])
    np.testing.assert_allclose(made[0], wanted, atol=1e-6)
    wanted[0, 2, 2], wanted[1, 1, 1], wanted[2, 0, :2] = 0.5, 0, 2
    np.testing.assert_allclose(made[1], wanted, atol=1e-6)


def test_energies_are_counted_over_the_own_words_of_a_rollout():
    """The second rollout is the first with words of another author between its tokens."""
    mask = np.array([[[1, 1, 1, 0, 0], [1, 0, 0, 1, 1]]], bool)
    rollouts = from_lists([[1, 0]], [[5, 5]], extras={"logit_gradients": np.array([[[1, 3, 2, 9, 9], [3, np.nan, 7, 1, 2.0]]])})
    made, _ = advantages.make("optimal_token_baseline").update(rollouts.replace(mask=jnp.asarray(mask)), ())
    np.testing.assert_allclose(made, [[[0.75, 0.5, 0.5, 0, 0], [-0.25, 0, 0, -0.5, -0.5]]], atol=1e-6)


def test_opo_is_the_best_baseline_where_the_squared_gradient_grows_with_the_length():
    """Of all constants c, sum_i l_i (r_i - c)^2, the trace of the second moment of the gradient, is smallest at OPO's."""
    rng = np.random.default_rng(0)
    rewards, lengths = rng.normal(size=6), rng.integers(1, 9, 6)
    best = rewards[0] - first("opo", from_lists([rewards], [lengths]))[0, 0]
    power = [(lengths * (rewards - best - step) ** 2).sum() for step in (-1e-2, 0, 1e-2)]
    assert power[1] < min(power[0], power[2])


@pytest.fixture
def data():
    rng = np.random.default_rng(3)
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    rewards = rng.choice([0.0, 0.5, 1.0], (P, G))
    rewards[1] = 0.5
    return {"mask": mask, "rewards": rewards, "logprobs": -rng.gamma(1.0, size=(P, G, T))}


def as_verl_opo(scores, response_mask):
    """verl's `adv_estimator=opo`: each score less the score of its group, averaged by the lengths of responses."""
    lengths = response_mask.sum(-1)
    return np.stack([row - np.average(row, weights=own) for row, own in zip(scores, lengths)])


def as_verl_gpg(scores, response_mask):
    """verl's `adv_estimator=gpg`: alpha is the size of the batch over the number of scores that are not 0."""
    return scores.size / np.count_nonzero(scores) * (scores - scores.mean(1, keepdims=True))


def as_gpg_trainer(rewards, completion_mask):
    """The authors' trainer with `adjust_gd`: the loss over the share of samples in groups whose rewards have a deviation."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1) > 0).mean()


def as_verl_remax(scores, response_mask):
    """verl's `adv_estimator=remax`: the return of every token less `reward_baselines`, the score of a greedy response."""
    return scores - REWARD_BASELINES[:, None]


@pytest.mark.parametrize(("slug", "estimator", "theirs", "seq_mean_token_sum"), [
    ("remax", "", as_verl_remax, True), ("opo", "", as_verl_opo, True),
    ("gpg", "rescale=rewarded", as_verl_gpg, False), ("gpg", "", as_gpg_trainer, False)])
def test_losses_and_gradients_of_rows_are_those_of_peers(double, data, slug, estimator, theirs, seq_mean_token_sum):
    """Policy-gradient losses, `loss_mode=gpg`, whose weights of tokens are those of `loss_agg_mode`."""
    weights = data["mask"] / (P * G if seq_mean_token_sum else data["mask"].sum())
    slope = -weights * theirs(data["rewards"], data["mask"])[..., None]
    made, objective = methods.build(slug, estimator=estimator)
    rollouts = Rollouts(mask=jnp.asarray(data["mask"]), valid=jnp.ones((P, G), bool), rewards=jnp.asarray(data["rewards"]),
                        extras={"greedy_rewards": jnp.asarray(REWARD_BASELINES)})
    values, _ = made.update(rollouts, ())
    loss, gradient = jax.value_and_grad(
        lambda logprobs: objective.update(logprobs, rollouts, values, objective.init())[0])(jnp.asarray(data["logprobs"]))
    np.testing.assert_allclose(loss, (slope * data["logprobs"]).sum(), rtol=1e-9)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-15)
    step = np.zeros((P, G, T))
    step[0, 0, 0] = 1e-4
    up, down = (objective.update(jnp.asarray(data["logprobs"] + sign * step), rollouts, values, objective.init())[0]
                for sign in (1, -1))
    np.testing.assert_allclose(gradient[0, 0, 0], (up - down) / 2e-4, rtol=1e-7)


def as_verl_optimal_token_baseline(scores, response_mask, old_log_probs, sum_pi_squared, handle_zero_tail):
    """verl's `tir_optimal_token_baseline`, one group and one token after another: `w = 1 - 2 pi + sum pi^2`, summed to W."""
    advantages = np.zeros(response_mask.shape)
    for row, mask, logp, squares, out in zip(scores, response_mask, old_log_probs, sum_pi_squared, advantages):
        places = [np.flatnonzero(own) for own in mask]
        W = [np.cumsum((1 - 2 * np.exp(logp[i]) + squares[i])[at]) for i, at in enumerate(places)]
        for t in range(mask.shape[1]):
            group = [i for i, at in enumerate(places) if t < len(at)]
            longest = handle_zero_tail and len(group) == 1
            b_star = 0 if longest else sum(row[i] * W[i][t] for i in group) / (sum(W[i][t] for i in group) + 1e-8)
            for i in group:
                out[i, places[i][t]] = row[i] - b_star
    return advantages


@pytest.mark.parametrize(("alone", "handle_zero_tail"), [("zero", False), ("raw", True)])
def test_the_optimal_token_baseline_is_that_of_verl(double, data, alone, handle_zero_tail):
    """Of distributions over seven tokens, with holes between the tokens of a rollout."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(P, G, T, 7))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    old, mask = np.log(chances[..., 0]), data["mask"] & (rng.random((P, G, T)) < 0.8)
    theirs = as_verl_optimal_token_baseline(data["rewards"], mask, old, (chances**2).sum(-1), handle_zero_tail)
    pulls = np.square(chances - (np.arange(7) == 0)).sum(-1)
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.ones((P, G), bool), rewards=jnp.asarray(data["rewards"]),
                        extras={"logit_gradients": jnp.asarray(pulls)})
    made, _ = advantages.make("optimal_token_baseline", alone=alone).update(rollouts, ())
    np.testing.assert_allclose(made, theirs, atol=1e-6)
    assert np.abs(theirs).max() > 0.5

"""MaxRL: literal numbers, the gradient that it estimates, and the formulas of peers on one random batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists

close = np.testing.assert_allclose


def maxrl(rewards, **hyper):
    values, _ = advantages.make("maxrl", **hyper).update(from_lists(rewards), ())
    return np.asarray(values, np.float64)[..., 0]


def test_worked_example():
    """One, two and four of four are right, and none: successes of a rare sort have the largest advantages."""
    close(maxrl([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
          [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]], atol=1e-7)
    close(maxrl([[1, 0.5, 0, 0.5]]), [[1, 0, -1, 0]], atol=1e-7)
    close(maxrl([[1, 0, 0, 0]], eps=0.25), [[1.5, -0.5, -0.5, -0.5]], atol=1e-7)


def test_a_group_of_one_and_a_mean_below_zero_carry_no_signal():
    assert not np.any(maxrl([[1.0]])) and not np.any(maxrl([[-1, 0.5]])) and not np.any(maxrl([[-1, 1]]))


def test_rewards_that_cancel_carry_no_signal_and_small_means_do():
    """The sum of the first group is 0, and its mean in float32 is 6e-8: divided by that, 3.4 would be 6e7."""
    assert not np.any(maxrl([[-0.3, -0.6, 0.1, -0.6, -0.9, -0.2, -0.9, 3.4]]))
    close(maxrl([[1e-4, 0, 0, 0], [1.1, -1, 0, 0.1]]), [[3, -1, -1, -1], [21, -21, -1, 1]], rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_gradient_is_that_of_the_truncated_log_likelihood_by_enumeration(size):
    """E[1/n sum_i A_i grad log p(a_i)] over all groups of draws from a 3-armed softmax; two of the arms are right."""
    prob, right = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 1.0])
    groups = [list(group) for group in itertools.product(range(3), repeat=size)]
    values = maxrl([right[group] for group in groups])
    scores = np.eye(3) - prob
    estimate = sum(np.prod(prob[group]) * a @ scores[group] / size for group, a in zip(groups, values))

    def truncated(logits):  # sum_k pass@k / k up to the order n - 1
        p = jax.nn.softmax(logits) @ right
        return sum((1 - (1 - p) ** k) / k for k in range(1, size))

    with jax.enable_x64(True):
        close(estimate, jax.grad(truncated)(jnp.log(prob)), atol=1e-6)


def test_a_pair_has_the_gradient_of_rloo_and_a_large_group_that_of_the_likelihood():
    pair, _ = advantages.make("rloo").update(from_lists([[1, 0], [1, 1], [0, 0]]), ())
    close(maxrl([[1, 0], [1, 1], [0, 0]]), np.asarray(pair)[..., 0], atol=1e-7)
    p, n = 0.2, 400
    few = int(p * n)
    gradient = maxrl([[1] * few + [0] * (n - few)])[0] @ np.r_[np.full(few, 1 - p), np.full(n - few, -p)] / n
    close(gradient, (1 - p), rtol=1e-5)  # d log p / d logit


def peer_batch():
    """14 rollouts of 3 prompts, of which the last has no success; scores, masks and log-probs in float64 beside them."""
    rng = np.random.default_rng(3)
    P, G, T = 3, 5, 4
    rewards = rng.choice([0.0, 0.5, 1.0], (P, G))
    rewards[2] = 0
    valid = np.ones((P, G), bool)
    valid[0, 2] = False
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    old = -rng.gamma(1.0, size=(P, G, T))
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.asarray(valid), rewards=jnp.asarray(rewards, jnp.float32),
                        old_logprobs=jnp.asarray(old, jnp.float32))
    return rollouts, rewards, valid, mask, old, old + 0.2 * rng.normal(size=old.shape)


def by_prompt(rewards, valid, of_group):
    """[P, G]: `of_group` of the list of each prompt's scores, put back at their places."""
    result = np.zeros(rewards.shape)
    for index, (scores, there) in enumerate(zip(rewards, valid)):
        result[index, there] = of_group(scores[there])
    return result


def test_as_prime_rl_and_skyrl():
    """prime-rl's `MaxRLAlgorithm.score_group` has no epsilon; SkyRL's `maxrl` and the authors' code have 1e-6."""
    rollouts, rewards, valid, mask, _, _ = peer_batch()

    def score_group(scores):
        mean = scores.mean()
        return np.zeros_like(scores) if mean <= 0 else (scores - mean) / mean

    def compute_maxrl_advantage(scores, epsilon=1e-6):
        return (scores - scores.mean()) / (scores.mean() + epsilon)

    for hyper, of_group in (({}, score_group), ({"eps": 1e-6}, compute_maxrl_advantage)):
        ours, _ = advantages.make("maxrl", **hyper).update(rollouts, ())
        close(ours, by_prompt(rewards, valid, of_group)[..., None] * (mask & valid[..., None]), rtol=1e-5, atol=1e-6)


def test_loss_and_gradient_as_the_authors_verl():
    """`adv_estimator=maxrl` under the vanilla policy loss, `loss_agg_mode=token-mean`, by central differences in float64."""
    rollouts, rewards, valid, mask, old, new = peer_batch()
    with jax.enable_x64(True):
        ours = jnp.asarray(by_prompt(rewards, valid, lambda x: (x - x.mean()) / (x.mean() + 1e-6)))[..., None] * mask
        response_mask = mask & valid[..., None]

        def compute_policy_loss_vanilla(log_prob):
            ratio = np.exp(log_prob - old)
            losses = np.maximum(-ours * ratio, -ours * np.clip(ratio, 0.8, 1.2))
            return (np.where(ours < 0, np.minimum(losses, -3 * ours), losses) * response_mask).sum() / response_mask.sum()

        exact = rollouts.replace(rewards=jnp.asarray(rewards), old_logprobs=jnp.asarray(old))
        advantage, _ = advantages.make("maxrl", eps=1e-6).update(exact, ())
        objective = objectives.make("ppo_clip", dual_clip=3.0)
        (loss, _), gradient = jax.value_and_grad(objective.update, has_aux=True)(jnp.asarray(new), exact, advantage, ())
        close(loss, compute_policy_loss_vanilla(new), rtol=1e-6)
        for place in np.ndindex(new.shape):
            step = np.zeros_like(new)
            step[place] = 1e-6
            difference = compute_policy_loss_vanilla(new + step) - compute_policy_loss_vanilla(new - step)
            close(gradient[place], difference / 2e-6, atol=1e-5)

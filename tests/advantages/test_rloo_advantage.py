"""Leave-one-out advantages: literal numbers, and an unbiased gradient where the plain group mean shrinks it."""

import itertools

import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists


def rloo(rewards, **hyper):
    values, _ = advantages.rloo(**hyper).update(from_lists(rewards), ())
    return np.asarray(values)[..., 0]


def test_worked_example():
    np.testing.assert_allclose(rloo([[1, 0, 0, 0.5]]), [[0.8333333, -0.5, -0.5, 0.1666667]], atol=1e-7)


def test_singleton_and_equal_groups():
    assert rloo([[3.0]]) == 0 and rloo([[3.0]], singleton="raw") == 3
    assert not np.any(rloo([[0.1] * 7]))


def test_is_the_centred_reward_times_n_over_n_minus_1():
    rewards = [[0.2, 1.0, 0.7], [1.0, 0.0]]
    centred, _ = advantages.make("dr_grpo").update(from_lists(rewards), ())
    factor = np.array([[3 / 2], [2]])
    np.testing.assert_allclose(rloo(rewards), np.asarray(centred)[..., 0] * factor, rtol=1e-6)


def test_gradient_is_unbiased_by_enumeration():
    """E[1/G sum_i A_i * grad log p(a_i)] over all groups of 3 draws from a 3-armed softmax equals grad E[r]."""
    prob, reward, size = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 0.4]), 3
    exact = prob * (reward - prob @ reward)
    groups = list(itertools.product(range(3), repeat=size))
    scores = np.eye(3) - prob
    for slug, factor in (("rloo", 1.0), ("dr_grpo", (size - 1) / size)):
        rollouts = from_lists([[reward[a] for a in group] for group in groups])
        values = np.asarray(advantages.make(slug).update(rollouts, ())[0])[..., 0]
        chances = [np.prod(prob[list(group)]) for group in groups]
        estimate = sum(p * a @ scores[list(group)] / size for p, a, group in zip(chances, values, groups))
        np.testing.assert_allclose(estimate, factor * exact, atol=1e-6)

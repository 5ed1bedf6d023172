"""Pass@k training: literal numbers, all sets and all groups by enumeration, the formulas of the authors and of verl."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import comb

from jaxrl_llm import advantages, methods
from jaxrl_llm.advantages.pass_at_k import drawn_sets, split_sets
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.setup import parts, why
from jaxrl_llm.setup.config import default_config

close = np.testing.assert_allclose


def run(rewards, slug="pass_at_k", rollouts=None, **hyper):
    """[P, G] in float64 of the first batch."""
    estimator = advantages.make(slug, **hyper)
    rollouts = from_lists(rewards) if rollouts is None else rollouts
    return np.asarray(jax.jit(estimator.update)(rollouts, estimator.init())[0], float)[..., 0]


def z_scores(x):
    return (x - x.mean()) / x.std() if x.std() else 0 * x


def test_worked_example():
    """k = 4: one of eight is right, three are, none, all, and five, after which every set has a right one.

    c = 1: R = 1/2, a failure has 1/2 - 20/35 over 1/2. c = 3: R = 13/14, s = sqrt(13)/14, a failure 1/14 - 4/35 over s.
    """
    one, three, none = [1] + [0] * 7, [1] * 3 + [0] * 5, [0] * 8
    wanted = [[1] + [-1 / 7] * 7, [13**-0.5] * 3 + [-0.6 / 13**0.5] * 5, none, none, none]
    close(run([one, three, none, [1] * 8, [1] * 5 + [0] * 3], eps=0), wanted, atol=1e-6)
    close(run([[1, 0, 0, 0]], k=2, combine=True, eps=0), [[0.25 + 0.75 * 3**0.5, *[-0.25 / 3 - 0.75 / 3**0.5] * 3]], rtol=1e-6)


def test_worked_example_of_split_sets():
    """[1 0 | 0 0] and a fifth rollout without a set: the sets have the z-scores 1 and -1."""
    close(run([[1, 0, 0, 0, 1]], k=2, sets="split", eps=0), [[1, 1, -1, -1, 0]], rtol=1e-6)
    keeps = advantages.make("pass_at_k", k=2, sets="split").keeps
    rollouts = from_lists([[1, 0, 0, 0, 1], [1, 0, 1, 0, 1], [0, 1, 1, 1, 0]])
    rollouts = rollouts.replace(valid=rollouts.valid.at[1, 1].set(False).at[2, :3].set(False))
    assert np.array_equal(keeps(rollouts), [[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    assert np.array_equal(split_sets(rollouts.valid, 2)[1:, :2], [[[1, 0, 1, 0, 0], [0, 0, 0, 1, 1]],
                                                                 [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_all_sets_by_enumeration(k):
    """Any rewards, with ties, groups of 6 and 4 valid rollouts, and one of k or fewer."""
    rng = np.random.default_rng(k)
    rewards, valid = rng.choice([-1.0, 0.0, 0.25, 2.0], (4, 6)), np.ones((4, 6), bool)
    valid[1, [0, 3]] = False
    valid[2, k:] = False
    wanted = np.zeros(rewards.shape)
    for p in np.flatnonzero(valid.sum(1) >= k):
        groups = list(itertools.combinations(np.flatnonzero(valid[p]), k))
        scores = z_scores(np.array([max(rewards[p, list(group)]) for group in groups]))
        for i in np.flatnonzero(valid[p]):
            wanted[p, i] = np.mean([score for score, group in zip(scores, groups) if i in group])
    rollouts = from_lists(rewards).replace(valid=jnp.asarray(valid))
    close(run(None, rollouts=rollouts, k=k, eps=0), wanted, atol=2e-6)


def test_k_of_one_is_the_z_score():
    rewards = np.random.default_rng(0).normal(size=(3, 7))
    close(run(rewards, k=1), run(rewards, slug="grpo", ddof=0), atol=1e-5)


def test_as_the_authors_code():
    """`calc_adv` of `passk_adv.py` for every number of successes of 32, k = 4, 8, 16; binomials of integers in float64."""
    n = 32
    rewards = np.tri(n + 1, n, -1)
    for k in (4, 8, 16):
        wanted = np.zeros((n + 1, n))
        for c in range(n + 1):
            rho = 1 - comb(n - c, k) / comb(n, k)
            sigma = np.sqrt(rho * (1 - rho))
            adv_p = (1 - rho) / (sigma + 1e-6)
            adv_n = (1 - rho - (comb(n - c - 1, k - 1) if c < n else 0) / comb(n - 1, k - 1)) / (sigma + 1e-6)
            wanted[c] = np.where(rewards[c] == 1, adv_p, adv_n)
        close(run(rewards, k=k), wanted, atol=1e-5)


def test_drawn_sets_have_k_different_rollouts_and_each_gives_its_score():
    rng = np.random.default_rng(1)
    rewards, valid = rng.choice([0.0, 1.0], (5, 8), p=[0.7, 0.3]), rng.random((5, 8)) < 0.8
    estimator = advantages.make("pass_at_k", k=3, sets="drawn", seed=7, eps=0)
    rollouts, state = from_lists(rewards).replace(valid=jnp.asarray(valid)), estimator.init()
    seen = []
    for step in range(2):
        member = np.asarray(drawn_sets(jax.random.fold_in(jax.random.key(7), step), rollouts.valid, 3))
        assert (member.sum(-1) == 3).all() and not (member & ~valid[:, None]).any()
        wanted = np.zeros(rewards.shape)
        for p in range(5):
            scores = z_scores(np.array([max(rewards[p, own]) for own in member[p, valid[p]]]))
            wanted[p] = scores @ member[p, valid[p]]
        values, state = estimator.update(rollouts, state)
        close(values[..., 0], wanted, atol=1e-5)
        seen.append(member)
    assert state == 2 and (seen[0] != seen[1]).any()
    shares = np.mean(drawn_sets(jax.random.key(0), jnp.ones((200, 8), bool), 3), axis=(0, 1))
    close(shares, 3 / 8, atol=0.05)  # every rollout is drawn equally often


def test_best_of_group_worked_example():
    """The best of [0, 2, 5, 5.5] adds 0.5; of two best ones none adds anything."""
    rewards = [[0, 2, 5, 5.5], [1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    close(run(rewards, slug="best_of_group", norm_std=False), [[0, 0, 0, 0.5], [0] * 4, [1, 0, 0, 0], [0] * 4], atol=1e-7)
    close(run([[1, 0, 0, 0]], slug="best_of_group", eps=0), [[2, 0, 0, 0]], rtol=1e-6)
    assert not np.any(run([[3.0]], slug="best_of_group"))


def test_best_of_group_as_verl():
    """`grpo_passk` by `norm_adv_by_std_in_grpo`: the two largest of a group, `torch.std`, 1e-6."""
    rng = np.random.default_rng(2)
    rewards, valid = rng.choice([0.0, 0.5, 1.0], (6, 5)), np.ones((6, 5), bool)
    valid[[1, 4], [0, 3]] = False
    for norm in (True, False):
        wanted = np.zeros(rewards.shape)
        for p in range(6):
            scores = np.where(valid[p], rewards[p], -np.inf)
            second, r_max = np.sort(scores)[-2:]
            std = rewards[p, valid[p]].std(ddof=1)
            wanted[p, scores.argmax()] = (r_max - second) / (std + 1e-6 if norm else 1)
        rollouts = from_lists(rewards).replace(valid=jnp.asarray(valid))
        close(run(None, slug="best_of_group", rollouts=rollouts, norm_std=norm), wanted, atol=1e-6)


def test_best_of_group_has_the_gradient_of_the_best_reward_by_enumeration():
    """E[sum_i A_i grad log p(a_i)] over all groups of 3 draws from a 3-armed softmax is the gradient of E[max r]."""
    prob, reward = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 0.4])
    groups = [list(group) for group in itertools.product(range(3), repeat=3)]
    values = run([reward[group] for group in groups], slug="best_of_group", norm_std=False)
    estimate = sum(np.prod(prob[group]) * a @ (np.eye(3) - prob)[group] for group, a in zip(groups, values))

    def best(logits):
        p = jax.nn.softmax(logits)
        return sum(jnp.prod(p[jnp.array(group)]) * max(reward[group]) for group in groups)

    close(estimate, jax.grad(best)(jnp.log(prob)), atol=1e-6)


@pytest.mark.parametrize("group, method, silent", [(4, "pass_at_k", True), (7, "pass_at_k_full", True),
                                                   (8, "pass_at_k_full", False)])
def test_a_group_that_makes_one_set_is_refused_before_the_run(group, method, silent):
    config = default_config()
    config.method, config.sampling.group = method, group
    lines = why.conflicting(config, parts.make_parts(config, 32))
    assert lines == [
        f"estimator 'pass_at_k' compares sets of k completions, and sampling.group={group} of a prompt make no two sets that "
        "differ; give more of them, or a smaller k, as in config.estimator=\"k=2\""] * silent


def test_numbers_that_are_no_sets_are_refused():
    for k, told in ((0, "'pass_at_k': k=0; give 1 or more"), (2.5, "'pass_at_k': k=2.5; give a whole number")):
        with pytest.raises(ValueError, match=told):
            advantages.make("pass_at_k", k=k)
    with pytest.raises(ValueError, match="Did you mean 'drawn'"):
        methods.build("pass_at_k", estimator="sets=draw")

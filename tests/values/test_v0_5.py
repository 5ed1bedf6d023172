"""V0.5: the worked examples and error tables of arXiv 2603.10848's equations, brute force, and the estimator's contract."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.values.v0_5 import draws_used, exact_risk, fuse, gain, wants_more

close = np.testing.assert_allclose

# Rewards of -1 and 1: prior, first rewards, what all later ones are -> rollouts used, mean, weight, baseline, first advantage.
EXAMPLES = [
    (0.6, [1, 1, 1, 1], 1, 4, 1, 0, 0.6, 0.4),
    (0.2, [1, -1, 1, 1], 1, 4, 0.5, 0, 0.2, 0.8),
    (-0.6, [1, 1, 1, 1], 1, 16, 1, 0.975586, 0.960938, 0.039062),
    (0.9, [-1, -1, -1, -1], -1, 16, -1, 0.982687, -0.967105, -0.032895),
    (0.0, [1, 1, 1, 1], 1, 15, 1, 0.933333, 0.933333, 0.066667),
]


def test_rollouts_used_and_baselines_of_the_examples():
    prior = jnp.array([row[0] for row in EXAMPLES])
    rewards = jnp.array([row[1] + [row[2]] * 12 for row in EXAMPLES], jnp.float32)
    used = jax.jit(lambda p, r: draws_used(p, r, variance=1.0))(prior, rewards)
    assert used.tolist() == [row[3] for row in EXAMPLES]
    rollouts = from_lists([row[1] + [row[2]] * (row[3] - 4) for row in EXAMPLES]).replace(extras={"prior": prior})
    assert rollouts.valid.sum(1).tolist() == used.tolist()
    mean = jnp.where(rollouts.valid, rollouts.rewards, 0).sum(1) / used
    fused = fuse(prior, mean, used, variance=1.0)
    close(mean, [row[4] for row in EXAMPLES])
    close(fused.weight, [row[5] for row in EXAMPLES], atol=6e-7)
    close(fused.baseline, [row[6] for row in EXAMPLES], atol=6e-7)
    assert fused.rejected.tolist() == [False, False, True, True, True]
    A, _ = advantages.v0_5(variance=1.0).update(rollouts, ())
    close(A[:, 0, 0], [row[7] for row in EXAMPLES], atol=6e-7)
    close(A[1, 1, 0], -1.2, rtol=1e-6)


@pytest.mark.parametrize(("prior", "mean", "variance", "expected"), [
    (0.5, 0.0, 1.0, (0.5, 0, 0, 0)),
    (0.2, 1.0, 1.0, (0.6875, 0.609375, 0.39, 0.152344)),
    (-0.4, 0.5, 1.0, (0.222222, 0.691358, 0.56, 0.172840)),
    (0.9, -1.0, 1.0, (-0.868421, 0.930748, 3.36, 0.232687)),
    (0.2, 0.75, 0.25, (0.636364, 0.793388, 0.24, 0.049587)),
])
def test_fusion_of_four_rewards(prior, mean, variance, expected):
    close(fuse(prior, mean, 4, variance=variance), expected, atol=6e-7)


@pytest.mark.parametrize("variance", [0, 0.0, -0.25, float("nan"), float("inf")])
def test_a_variance_that_is_none_is_refused(variance):
    for make in (lambda: advantages.v0_5(variance=variance), lambda: fuse(0.5, 0.5, 4, variance=variance)):
        with pytest.raises(ValueError, match="variance=.*; give a (positive finite )?number"):
            make()


def test_gain_of_one_more():
    k = jnp.arange(4, 9)
    close(gain(0.5, k, variance=1.0), [0.023810, 0.017857, 0.013889, 0.011111, 0.009091], atol=6e-7)
    close(gain(0.5, jnp.array([13, 14]), variance=1.0), [0.004167, 0.003676], atol=6e-7)
    hopeless = fuse(1e4, 0.0, jnp.arange(1, 17), variance=1.0)
    more = wants_more(hopeless, jnp.arange(1, 17), variance=1.0)
    assert more.tolist() == [True] * 15 + [False]
    # Rewards and their unit: the rule is the same for {0, 1} as for -1 and 1.
    k, prior, mean = jnp.arange(1, 17), jnp.linspace(-1, 1, 16), jnp.linspace(1, -0.3, 16)
    wide = wants_more(fuse(prior, mean, k, variance=1.0), k, variance=1.0)
    narrow = wants_more(fuse((prior + 1) / 2, (mean + 1) / 2, k, variance=0.25), k, variance=0.25)
    assert wide.tolist() == narrow.tolist() and not all(wide)
    with pytest.raises(ValueError, match="k_init=5, k_max=4"):
        wants_more(hopeless, k, variance=1.0, k_init=5, k_max=4)


@pytest.mark.parametrize(("true_mean", "alone", "table"), [
    (0.0, 0.25, {0: 0.0703, 0.25: 0.1138, 0.5: 0.2309, 0.75: 0.2859, 1: 0.4116, 1.5: 0.3774}),
    (0.6, 0.16, {0: 0.0280, 0.25: 0.0551, 0.5: 0.1619, 0.75: 0.2134, 1: 0.2600, 1.5: 0.2408}),
])
def test_squared_error_by_enumeration_wins_near_the_truth_and_loses_in_a_hump(true_mean, alone, table):
    for bias, expected in table.items():
        risk = exact_risk(true_mean - bias, true_mean, low=-1.0, k_init=4, k_max=4)
        close(risk.mse, expected, atol=5.1e-5)
        assert risk.draws == 4
    assert max(table.values()) > alone > table[0]


def test_one_test_in_eight_is_a_false_alarm():
    assert exact_risk(0.0, 0.0, low=-1.0, k_init=4, k_max=4).rejected == 0.125


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
def test_enumeration_agrees_with_all_sequences_one_by_one(chunk):
    options = {"k_init": 2, "chunk": chunk, "cost": 0.002}
    rewards = np.array(list(itertools.product([0.0, 1.0], repeat=8)), np.float32)
    probability = np.prod(np.where(rewards > 0, 0.3, 0.7), axis=1)
    prior = jnp.full(len(rewards), 0.75)
    used = np.asarray(draws_used(prior, jnp.asarray(rewards), variance=0.25, **options))
    assert len(set(used)) > 2 and set((used - 2) % chunk) <= {0, 6 % chunk}
    mean = np.array([row[:k].mean() for row, k in zip(rewards, used)])
    fused = fuse(np.asarray(prior), mean, used, variance=0.25)
    expected = [probability @ (np.asarray(fused.baseline) - 0.3) ** 2, probability @ used, probability @ fused.rejected]
    close(exact_risk(0.75, 0.3, k_max=8, **options), expected, rtol=1e-5)


def test_looking_ahead_spends_on_bad_priors_and_lowers_every_error_of_the_table():
    """By a tenth in the hump: a prior that is off by one is believed by chance in 31 % of the groups, and drawing stops."""
    risks = {bias: exact_risk(bias, 0.0, low=-1.0) for bias in (0, 0.25, 0.5, 0.75, 1, 1.5)}
    close([risk.mse for risk in risks.values()], [0.0074, 0.0637, 0.1956, 0.2750, 0.3684, 0.2035], atol=5.1e-5)
    close([risk.draws for risk in risks.values()], [4.5643, 5.4164, 6.3236, 9.8559, 11.3333, 14.9882], atol=5.1e-5)
    assert all(risk.mse < exact_risk(bias, 0.0, low=-1.0, k_max=4).mse for bias, risk in risks.items())
    assert risks[1].rejected == 1 - 5 / 16
    with pytest.raises(ValueError, match="true_mean=2"):
        exact_risk(0.0, 2.0)


def test_leave_one_out_is_the_fusion_with_the_others():
    rewards, prior = [[1.0, 0, 1, 1, 0], [0.0, 1], [1.0]], np.array([0.1, 0.9, 0.4])
    rollouts = from_lists(rewards).replace(extras={"prior": jnp.asarray(prior)})
    A, _ = advantages.v0_5(leave_one_out=True).update(rollouts, ())
    for p, row in enumerate(rewards):
        for i, r in enumerate(row):
            others, b = row[:i] + row[i + 1:], prior[p]
            if others:
                noise, gap = 0.25 / len(others), np.mean(others) - b
                b += max(0.0, 1 - noise / gap**2) * gap  # positive-part James-Stein
            close(A[p, i, 0], r - b, rtol=1e-5)
    close(A[2, 0, 0], 0.6, rtol=1e-6)


def test_leave_one_out_has_no_bias_and_the_plain_baseline_has():
    """`E[A_i d log p(r_i)]` over all groups of three against the true gradient `p (1 - p)` of the mean in its logit."""
    p, prior = 0.3, 0.9
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=3)), np.float32)
    weight = np.prod(np.where(groups > 0, p, 1 - p), axis=1)
    rollouts = from_lists(groups.tolist()).replace(extras={"prior": jnp.full(8, prior)})
    gradient = {}
    for one_out in (False, True):
        A = np.asarray(advantages.v0_5(leave_one_out=one_out).update(rollouts, ())[0][..., 0])
        gradient[one_out] = weight @ (A * (groups - p)).mean(1)
    close(gradient[True], p * (1 - p), rtol=1e-5)
    assert gradient[False] < 0.9 * p * (1 - p)


def test_dividing_by_the_deviation_leaves_equal_groups_alone():
    rollouts = from_lists([[1, 1, 1], [1, 0, 1]]).replace(extras={"prior": jnp.array([0.2, 0.5])})
    plain, _ = advantages.v0_5().update(rollouts, ())
    divided, _ = advantages.v0_5(norm_std=True).update(rollouts, ())
    close(divided[0], plain[0])
    assert plain[0, 0, 0] > 0
    close(divided[1], plain[1] / (np.std([1, 0, 1], ddof=1) + 1e-6), rtol=1e-6)


def test_the_prior_has_to_be_recorded():
    with pytest.raises(ValueError, match=r"extras\['prior'\]"):
        advantages.v0_5().update(from_lists([[1, 0]]), ())


def test_metrics_leave_prompts_without_rollouts_out():
    rollouts = from_lists([[1, 1, 1, 1], [1, 0], [0, 0]]).replace(extras={"prior": jnp.array([0.2, 0.5, 0.9])})
    rollouts = rollouts.replace(valid=rollouts.valid.at[2].set(False))
    estimator = advantages.v0_5()
    A, _ = estimator.update(rollouts, ())
    measured = estimator.metrics(rollouts, A, ())
    weight = 1 - 0.25 / 4 / 0.8**2
    expected = {"rollouts": 3, "rejected": 0.5, "weight": weight / 2, "prior_mean": 0.35, "prior_error": 0.32}
    assert {name.removeprefix("v0_5/") for name in measured} == set(expected)
    for name, value in expected.items():
        close(measured[f"v0_5/{name}"], value, rtol=1e-5)

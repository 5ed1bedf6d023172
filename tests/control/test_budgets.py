"""Rollout budgets: the worked examples of the papers, brute force, and exact totals."""

import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jaxrl_llm import advantages
from jaxrl_llm.control import budget, gvm_raft, prompt_average, reinforce_ada
from jaxrl_llm.data.rollouts import Rollouts, from_lists

close = np.testing.assert_allclose


def test_utility_of_v0():
    p = jnp.array([0.1, 0.38, 0.5, 0.9])
    steps = jnp.stack([budget.signal_gain(p, jnp.float32(n)) for n in range(1, 8)])  # U(1) = 0
    close(steps[:1].sum(0), [0.18, 0.4712, 0.5, 0.18], rtol=1e-5)
    close(steps[:3].sum(0), [0.9756, 1.88895, 1.75, 0.3996], rtol=1e-5)
    close(steps[:7].sum(0), [3.75626, 4.78533, 3.96875, 0.8], rtol=1e-5)
    for n in (2, 5):  # the expected number of failures in mixed groups, from the binomial distribution itself
        mixed = sum((n - k) * math.comb(n, k) * 0.38**k * 0.62**(n - k) for k in range(1, n))
        close(steps[:n - 1, 1].sum(), mixed, rtol=1e-5)


@pytest.mark.parametrize(("p", "options", "expected"), [
    ((0, 1, 0.386, 0.611, 0.664), {}, (2, 2, 32, 2, 2)),
    ((0, 1, 0.386, 0.611, 0.664), {"high": 12}, (2, 2, 12, 12, 12)),
    ((0, 1, 0.386, 0.611, 0.664), {"utility": "per_rollout"}, (2, 2, 17, 10, 9)),
    ((0.05, 0.3, 0.5, 0.8, 0.97), {}, (2, 32, 2, 2, 2)),
    ((0.05, 0.3, 0.5, 0.8, 0.97), {"high": 16}, (2, 16, 16, 4, 2)),
    ((0.05, 0.3, 0.5, 0.8, 0.97), {"utility": "per_rollout"}, (21, 9, 5, 3, 2)),
    ((0.05, 0.3, 0.5, 0.8, 0.97), {"utility": "per_rollout", "high": 16}, (16, 11, 7, 4, 2)),
    ((0, 0.05, 0.2, 0.5, 0.9), {"utility": "knapsack", "high": 32}, (2, 14, 15, 7, 2)),
    ((0, 1, 0.5, 0.5, 1), {"high": 9, "total": 29}, (4, 4, 9, 9, 3)),  # rollouts without a gain are spread evenly
    ((0, 0.5, 1, 0.5, 0.9), {"total": 12, "low": 0, "utility": "per_rollout"}, (0, 5, 0, 5, 2)),
    ((0.5, 0.4), {"total": 3}, (2, 2)),
    ((0.5, 0.4), {"total": 99, "high": 5}, (5, 5)),
])
def test_examples(p, options, expected):
    assert tuple(budget.allocate(p, **({"total": 40} | options)).tolist()) == expected


def mixed(p, n):
    return 1 - p**n - (1 - p)**n


VALUES = {
    "per_rollout": lambda p, n: (1 - p) * (1 - (1 - p)**(n - 1)),
    "knapsack": lambda p, n: mixed(p, n) * p * (1 - p)**2,
}


def test_knapsack_numbers():
    p, n = np.array([0, 0.05, 0.2, 0.5, 0.9]), np.array([2, 14, 15, 7, 2])
    close(VALUES["knapsack"](p, n).sum(), 0.2712819, atol=5e-8)
    close(VALUES["knapsack"](p, 8).sum(), 0.2508622, atol=5e-8)
    close(mixed(p, n), [0, 0.512325, 0.964816, 0.984375, 0.18], atol=6e-7)
    one = jnp.array([0.05, 0.2, 1 / 3, 0.5, 0.9])
    total = sum(budget.knapsack_gain(one, jnp.float32(k)) for k in range(1, 8))
    close(total, [0.015188, 0.106525, 0.142345, 0.124023, 0.005126], atol=6e-7)


@pytest.mark.parametrize("utility", VALUES)
def test_concave_utilities_are_maximised_exactly(utility):
    rng = np.random.default_rng(0)
    allocate = jax.jit(lambda p: budget.allocate(p, total=14, low=1, high=7, utility=utility))
    options = np.array([n for n in itertools.product(range(1, 8), repeat=4) if sum(n) == 14])
    for p in [rng.uniform(0, 1, 4) for _ in range(8)] + [np.array([0, 1, 0.5, 0.01])]:
        counts = np.asarray(allocate(jnp.asarray(p, jnp.float32)))
        assert counts.sum() == 14
        close(VALUES[utility](p, counts).sum(), VALUES[utility](p, options).sum(1).max(), rtol=1e-6)


@pytest.mark.slow
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(p=strategies.lists(strategies.floats(0, 1, width=32), min_size=5, max_size=5),
                  total=strategies.integers(0, 70), low=strategies.integers(0, 3), more=strategies.integers(0, 9),
                  utility=strategies.sampled_from(sorted(budget.UTILITIES)))
def test_totals_and_caps_are_kept(p, total, low, more, utility):
    counts = np.asarray(budget.allocate(p, total=total, low=low, high=low + more, utility=utility))
    assert counts.sum() == min(max(total, 5 * low), 5 * (low + more))
    assert counts.min() >= low and counts.max() <= low + more


def test_impossible_allocations_are_refused():
    with pytest.raises(ValueError, match="utility 'per_rolout'. Did you mean 'per_rollout'"):
        budget.allocate([0.5], total=4, utility="per_rolout")
    with pytest.raises(ValueError, match="low=4, high=2"):
        budget.allocate([0.5], total=4, low=4, high=2)


def test_a_prompt_without_rollouts_gets_two_at_once():
    """A single one carries no signal: the last of 7 rollouts is a prompt's fourth, and nobody's first."""
    assert budget.allocate([0.5] * 4, total=7, low=0, utility="per_rollout").tolist() == [4, 3, 0, 0]
    assert budget.allocate([0.0, 1.0, 0.5, 0.4], total=6, low=0, utility="per_rollout").tolist() == [0, 0, 3, 3]
    assert budget.allocate([0.5, 0.5], total=1, low=0).tolist() == [1, 0]


# GVM-RAFT


def test_least_variance():
    p, g = jnp.array([0, 0.05, 0.25, 0.6, 1]), jnp.array([0, 3, 2, 1.5, 0.4])
    close(gvm_raft.shares(p, g), [0, 0.642763, 0.224953, 0.109621, 0.022663], atol=6e-7)
    counts = gvm_raft.allocate(p, g, total=40)
    assert counts.tolist() == [0, 26, 9, 4, 1]
    def variance(n):
        return (np.asarray(g)[1:]**2 / (np.asarray(p)[1:] * n)).sum()
    close(variance(np.asarray(counts)[1:]), 9.798355, rtol=1e-6)
    close(variance(8), 24.988750, rtol=1e-6)
    assert gvm_raft.allocate(p, g, total=40, drop_above=0.9).tolist()[4] == 0
    assert gvm_raft.allocate(p, g, total=40, drop_below=1.0).tolist() == [0, 26, 9, 5, 0]
    assert gvm_raft.allocate(jnp.zeros(3), g[:3], total=7).tolist() == [3, 2, 2]


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(weights=strategies.lists(strategies.floats(0.01, 1), min_size=6, max_size=6),
                  total=strategies.integers(1, 300))
def test_rounding_keeps_the_total_and_changes_no_count_by_more_than_one(weights, total):
    share = np.array(weights) / sum(weights)
    counts = np.asarray(gvm_raft.round_shares(jnp.asarray(share, jnp.float32), total))
    assert counts.sum() == total and counts.min() >= 0
    assert np.abs(counts - share * total).max() < 1 + 1e-3


# Reinforce-Ada


STREAM = jnp.array([[0.0, 0, 0, 1, 0, 0, 1, 0]])


def drawn(n):
    return jnp.arange(8)[None] < n


def test_rounds_until_both_outcomes_are_seen():
    wants = reinforce_ada.wants_more
    assert [wants(STREAM, drawn(n)).item() for n in (0, 4, 8)] == [True, True, False]
    assert [wants(STREAM, drawn(n), rule="positive_focused").item() for n in (0, 3, 4)] == [True, True, False]
    assert advantages_of(STREAM, drawn(8)) == [{3: 0.75, 6: 0.75, 0: -0.25, 1: -0.25}]
    assert advantages_of(STREAM, drawn(4), rule="positive_focused") == [{3: 0.75, 0: -0.25, 1: -0.25, 2: -0.25}]


def advantages_of(rewards, valid, **hyper):
    """For each prompt, `{draw: advantage}` of the kept draws."""
    rollouts = Rollouts(mask=valid[..., None], valid=valid, rewards=rewards)
    chosen = advantages.make("reinforce_ada", **hyper)
    A, kept = chosen.update(rollouts, ())[0][..., 0], np.asarray(chosen.keeps(rollouts))
    return [{int(i): float(A[p, i]) for i in np.flatnonzero(row)} for p, row in enumerate(kept)]


def reference(row, keep, rule):
    """The kept draws of one prompt, by the paper's loop."""
    right, wrong = [i for i, r in enumerate(row) if r], [i for i, r in enumerate(row) if not r]
    take = min(keep, len(row))
    if rule == "balanced":
        a = min(keep // 2, len(right))
        b = min(keep - a, len(wrong))
    else:
        a = min(max(math.ceil(len(right) / len(row) * keep), 1), max(take - 1, 1))
        a = min(a, len(right))
        b = min(take - a, len(wrong))
    a = min(len(right), take - b)
    return right[:a] + wrong[:min(take - a, len(wrong))]


@pytest.mark.parametrize("rule", reinforce_ada.RULES)
def test_kept_draws_agree_with_the_loop(rule):
    rows = [row for n in (1, 2, 5, 6) for row in itertools.product([0.0, 1.0], repeat=n)]
    rollouts = from_lists([list(row) for row in rows])
    for row, result in zip(rows, advantages_of(rollouts.rewards, rollouts.valid, rule=rule)):
        assert sorted(result) == sorted(reference(row, 4, rule)), row
        mean = np.mean(row) if len(row) > 1 else 0
        close([result[i] for i in sorted(result)], [row[i] - mean for i in sorted(result)], atol=1e-6)


def test_one_outcome_gives_no_signal_and_a_rare_one_much_with_std():
    rollouts = from_lists([[1.0] * 6, [0, 0, 0, 1.0, 0, 0]])
    same, rare = advantages_of(rollouts.rewards, rollouts.valid, norm_std=True)
    assert set(same.values()) == {0.0}
    close(rare[3], (1 - 1 / 6) / np.std([0, 0, 0, 1, 0, 0], ddof=1), rtol=1e-5)
    metrics = advantages.make("reinforce_ada").metrics(rollouts, None, ())
    assert {name: float(x) for name, x in metrics.items()} == {"reinforce_ada/rollouts": 6, "reinforce_ada/mixed": 0.5}
    with pytest.raises(ValueError, match="rule 'balance'. Did you mean 'balanced'"):
        reinforce_ada.kept(rollouts.rewards, rollouts.valid, rule="balance")


# A moving average per prompt


def test_moving_average_of_each_prompt():
    state = prompt_average.empty(4)
    ids = jnp.array([3, 0, -1, 9])
    close(prompt_average.predict(state, ids), [0.5] * 4)
    first = from_lists([[1, 1, 0, 0], [1, 0], [1, 1], [1, 1]]).replace(prompt_ids=jnp.array([3, 0, -1, 9]))
    state = prompt_average.observe(state, first)
    assert state.average.tolist() == [0.5, 0, 0, 0.5] and state.weight.tolist() == [2, 0, 0, 4]
    second = from_lists([[1, 1], [1, 1], [0, 0]]).replace(prompt_ids=jnp.array([3, 3, 1]))
    state = jax.jit(prompt_average.observe)(state, second)
    close(state.average, [0.5, 0, 0, (0.5 * 4 * 0.5 + 4) / 6])
    close(state.weight, [2, 2, 0, 6])
    close(prompt_average.predict(state, jnp.array([0, 1, 2, -1, 4])), [0.5, 0, *[(0.5 + 0 + 5 / 6) / 3] * 3], rtol=1e-6)
    close(prompt_average.predict(state, jnp.array([2, 3]), unknown=-1.0), [-1, 5 / 6], rtol=1e-6)
    everything = prompt_average.observe(prompt_average.observe(prompt_average.empty(4), first, decay=1.0), second, decay=1.0)
    close(everything.average[3], 6 / 8)

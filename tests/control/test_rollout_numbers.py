"""Numbers of rollouts: bandits of bins, a price, success rates, and the effect of few samples on the mass of right answers."""
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from one_task import alone

from jaxrl_llm import control
from jaxrl_llm.control import accuracy_bins, brorl, dart_curation, gdro_rollout
from jaxrl_llm.data.rollouts import Role, Rollouts, from_lists

close = np.testing.assert_allclose
SEED = jax.random.key_data(jax.random.key(3))


# --- bins and bandits of group DRO


def test_bins_and_their_margins():
    result = accuracy_bins.bins_of(jnp.array([0, 0.5, 1]), jnp.array([-1, 3, -1]))
    assert result.tolist() == [0, 3, 6]
    accuracy, previous = jnp.array([0.62, 0.64, 0.58, 0.56, 0.62]), jnp.array([3, 3, 4, 4, -1])
    assert accuracy_bins.bins_of(accuracy, previous).tolist() == [3, 4, 4, 3, 4]  # beyond 0.6 by 0.03, or new


def test_windows_forget():
    state = accuracy_bins.unseen(2, 3)
    assert accuracy_bins.accuracy(state).tolist() == [0, 0]
    for solved in (True, True, False, False):
        state = accuracy_bins.visited(state, jnp.array([True, False]), jnp.array([solved, True]))
    close(accuracy_bins.accuracy(state), [1 / 3, 0])
    assert state.visits.tolist() == [4, 0]


def gains_of_the_example():
    return jnp.zeros((3, 11)).at[1, 5].set(1).at[2, 0].set(1)


SIZES = tuple(range(2, 13))


def test_joint_choice_and_update():
    counts, gains = jnp.array([4, 2, 2]), gains_of_the_example()
    arms = gdro_rollout.joint_arms(counts, gdro_rollout.arm_probabilities(gains), SIZES, 32)
    assert (arms + 2).tolist() == [2, 7, 5] and int((counts * (arms + 2)).sum()) == 32
    for sign, expected in ((1, [0.2, 1.1, -0.1]), (-1, [-0.2, 0.9, 0.1])):
        new = gdro_rollout.played(gains, arms, jnp.array([0.2, 0.1, -0.1]), 0.0, jnp.asarray(SIZES), 4.0, sign=sign)
        close(new[jnp.arange(3), arms], expected, rtol=1e-6)
        assert int((new != gains).sum()) == 3


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(counts=strategies.lists(strategies.integers(0, 4), min_size=3, max_size=3), seed=strategies.integers(0, 99))
def test_the_total_is_met_by_the_likeliest_choice(counts, seed):
    """Against all choices: the nearest total, and among those the largest sum of log-probabilities."""
    sizes, total = (1, 2, 3), 2 * sum(counts)
    gains = np.random.default_rng(seed).normal(size=(3, 3)).astype(np.float32)
    probabilities = gdro_rollout.arm_probabilities(jnp.asarray(gains))
    close(probabilities.sum(1), 1, rtol=1e-6)
    arms = np.asarray(gdro_rollout.joint_arms(jnp.asarray(counts), probabilities, sizes, total))
    assert ((arms < 0) == (np.array(counts) == 0)).all()
    logs, there = np.log(np.asarray(probabilities)), np.flatnonzero(counts)

    def value(choice):
        spent = sum(counts[b] * sizes[arm] for b, arm in zip(there, choice))
        return -abs(spent - total), sum(logs[b, arm] for b, arm in zip(there, choice))

    best, mine = max(map(value, itertools.product(range(3), repeat=len(there)))), value(arms[there])
    assert mine[0] == best[0] and (mine[1] == pytest.approx(best[1], abs=1e-4))


@pytest.mark.slow
def test_bandits_use_the_whole_budget_of_a_run():
    """Each step has exactly two groups per prompt on average, and problems come in passes."""
    one = control.make("gdro_rollout")
    state = one.init(shares=alone(20), batch=4, seed=SEED, group=2, max_group=12)
    rates, observe, drawn = np.linspace(0, 1, 20), jax.jit(one.observe), []
    rng = np.random.default_rng(0)
    for _ in range(40):
        result = one.propose(state)
        ids, sizes = (np.asarray(result[name]) for name in ("prompt_ids", "group_sizes"))
        assert (sizes % 2 == 0).all() and sizes.min() >= 2 and sizes.max() <= 12 and sizes.sum() == 4 * 4
        drawn += ids.tolist()
        tried = np.zeros(20, np.int32)
        tried[ids] = sizes
        state = observe(state, {"tried": tried, "right": rng.binomial(tried, rates).astype(np.int32)})
    assert np.bincount(drawn).tolist() == [8] * 20 and float(state.price) == 0
    assert len(set(np.asarray(state.windows.bins).tolist())) > 2 and np.abs(state.gains).max() > 0


@pytest.mark.slow
def test_the_loss_of_an_arm_is_the_failure_of_its_bin_above_the_mean():
    """A usual share of failures changes no gain; a larger share raises the gain of the played arm."""
    one = control.make("gdro_rollout", mean=2)
    state = one.init(shares=alone(1), batch=1, seed=SEED, group=2, max_group=6)
    assert np.isnan(state.usual).all() and np.asarray(state.arms).tolist() == [1, -1, -1, -1, -1, -1, -1]
    for right, usual, gain in ((3, 0.25, 0), (3, 0.25, 0), (2, 0.28, 0.25), (4, 0.2464, -0.03)):
        state = one.observe(state, {"tried": np.array([4]), "right": np.array([right])})
        state = state._replace(windows=accuracy_bins.unseen(1, 100), arms=jnp.array([1, -1, -1, -1, -1, -1, -1]))  # as before
        close(state.usual[0], usual, rtol=1e-6)
        close(state.gains[0], [0, gain, 0], atol=1e-6)
        assert np.isnan(state.usual[1:]).all() and not state.gains[1:].any()


def test_failures_alone_change_no_gain():
    """A bin of unsolved problems: in 30 steps all gains stay 0 for any sequence of arms."""
    one = control.make("gdro_rollout")
    state, observe = one.init(shares=alone(8), batch=4, seed=SEED, group=2, max_group=12), jax.jit(one.observe)
    for _ in range(30):
        result = one.propose(state)
        tried = np.zeros(8, np.int32)
        tried[np.asarray(result["prompt_ids"])] = np.asarray(result["group_sizes"])
        state = observe(state, {"tried": tried, "right": np.zeros(8, np.int32)})
    assert not state.gains.any() and state.usual[0] == 1
    with pytest.raises(ValueError, match="sampling.max_group=4 is no more than the 2 groups of 2"):
        one.init(shares=alone(8), batch=4, seed=SEED, group=2, max_group=4)


def test_arms_gain_the_surrogate_loss_of_their_bin():
    """Two rows of one problem are one group: rewards 1, 0, 0, 1 have A = +-0.866025 (sample std); ratios 1.5 where right."""
    rollouts = from_lists([[1, 0], [0, 1]], prompt_ids=np.array([1, 1]))
    ratios = jnp.array([[[1.5], [1]], [[1], [1.5]]])
    expected = (2 * 0.866025 - 2 * 0.866025 * 1.28) / 4
    close(gdro_rollout.of_problems(rollouts, ratios, 3), [0, expected, 0], atol=1e-5)
    one = control.make("gdro_rollout", signal="surrogate")
    state = one.init(shares=alone(3), batch=1, seed=SEED, group=2, max_group=12)
    state = state._replace(arms=jnp.array([1, -1, -1, -1, -1, -1, -1]))
    facts = {"tried": jnp.array([0, 4, 0]), "right": jnp.array([0, 2, 0]), "rollouts": rollouts, "ratios": ratios}
    new = one.observe(state, facts)
    close(new.gains[0, :3], [0, expected, 0], atol=1e-5)
    assert one.facts == ("tried", "right", "rollouts", "ratios") and not np.asarray(new.gains[1:]).any()


# --- DART


def test_dart_numbers():
    success = jnp.array([0, 0.5, 0.6, 0.7, 1])
    assert dart_curation.rollouts_of(success, 8).tolist() == [8, 8, 8, 6, 2]
    assert dart_curation.step_limit(jnp.array([0, 12, 7, 9, 3])).tolist() == [30, 12, 7, 9, 3]


def test_dart_samples_successful_problems_less():
    one = control.make("dart_curation")
    state = one.init(shares=alone(2), batch=2, seed=SEED, max_group=8)
    sizes = []
    for right in ([0, 8], [0, 2], [8, 0]):
        result = one.propose(state)
        sizes.append(dict(zip(result["prompt_ids"].tolist(), result["group_sizes"].tolist())))
        tried = np.array([sizes[-1][0], sizes[-1][1]], np.int32)
        state = one.observe(state, {"tried": tried, "right": np.array(right, np.int32)})
    assert sizes == [{0: 8, 1: 8}, {0: 8, 1: 2}, {0: 8, 1: 2}]
    result = one.propose(state)  # problem 0: 8 of 8 + 4 + 2, problem 1: 0 + 1 + 2 of 2 + 1 + 2
    assert dict(zip(result["prompt_ids"].tolist(), result["group_sizes"].tolist())) == {0: 8, 1: 8}


def test_dart_limits_a_problem_by_its_longest_success():
    """Problem 0 has right rollouts of 2 and 3 tokens, of which one was read; later ones and strangers change nothing."""
    role = np.zeros((3, 3, 4), np.int8)
    for place, length in np.ndenumerate(np.array([[2, 3, 4], [1, 2, 3], [4, 4, 4]])):
        role[place][:length] = Role.POLICY
    role[0, 1, 1] = Role.ENVIRONMENT
    rollouts = Rollouts(mask=role == Role.POLICY, valid=np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool), role=role,
                        rewards=np.float32([[1, 1, 0], [0, 0, 1], [1, 1, 1]]), prompt_ids=np.array([0, 2, -1]))
    one = control.make("dart_lengths")
    state = one.init(prompts=3, max_tokens=9)
    assert one.propose(state)["token_limits"].tolist() == [9, 9, 9]
    state = one.observe(state, {"rollouts": rollouts})
    assert one.propose(state)["token_limits"].tolist() == [3, 9, 9]  # problem 2: wrong, or lost
    shorter = rollouts.replace(rewards=np.float32([[1, 0, 0], [0, 1, 0], [0, 0, 0]]), prompt_ids=np.array([0, 2, 1]))
    assert one.propose(one.observe(state, {"rollouts": shorter}))["token_limits"].tolist() == [3, 9, 2]


# --- BroRL


def test_the_learning_rate_grows_with_the_root_of_the_batch():
    assert brorl.learning_rate_factor(512, 128) == 2
    one = control.make("brorl")  # the paper's 128 x 512 rollouts, and ProRL's 512 x 16
    close(one.propose(one.init(group=512))["learning_rate"], np.sqrt(128 * 512 / (512 * 16)), rtol=1e-6)
    one = control.make("brorl", usual=8)
    state = one.init(group=8)
    assert one.propose(one.observe(state, {"step": jnp.int32(3)}))["learning_rate"] == 1
    with pytest.raises(ValueError, match="usual=0 rollouts of a prompt; give 1 or more"):
        control.make("brorl", usual=0)

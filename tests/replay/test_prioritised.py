"""Priorities: chances and weights by hand, how often groups are drawn, and that a checkpoint keeps them."""
import json

import numpy as np
import pytest
from test_replay_buffer import EMPTY, PROBLEMS, batch, step, uids

from jaxrl_llm import replay
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.replay import priorities
from jaxrl_llm.replay.prioritised import chances, importance


def buffer_of(rule, rewards, version=0):
    return step(rule, buffers.empty(rule, EMPTY), batch(range(len(rewards)), rewards, version), version)


def test_chances_and_weights_by_hand():
    """Priorities 1 and 1/32 with exponent .6: 8 to 1; the rarer counts eight times as much, with correction 1."""
    priority = np.float32([1, 1 / 32])
    np.testing.assert_allclose(chances(priority, 0.6), [8 / 9, 1 / 9])
    np.testing.assert_allclose(importance(priority, 0.6, 1.0), [1 / 8, 1])
    np.testing.assert_allclose(importance(priority, 0.6, 0.5), [8**-0.5, 1])
    np.testing.assert_allclose(importance(np.full(5, 0.3), 0.6, 1.0), 1)
    result = replay.make("prioritised").weights(np.float32([0.75, 0.25, 1e-6]))  # the last is a group of right rollouts alone
    np.testing.assert_allclose(result, [0.444, 0.474, 1], atol=1e-3)
    assert importance(np.float32([0.75, 1e-6]), 0.6, 1.0)[0] < 1e-3


def test_probabilities_sum_to_one_and_the_least_is_bounded():
    rng = np.random.default_rng(0)
    for _ in range(50):
        priority = np.clip(rng.random(rng.integers(1, 40)) ** 8, 1e-6, 1)
        result, weights = chances(priority, 0.6), importance(priority, 0.6, 1.0)
        assert result.sum() == pytest.approx(1) and result.min() >= (1e-6**0.6) / len(priority) - 1e-12
        assert weights.max() == 1 and weights.min() > 0
        np.testing.assert_allclose(weights * result / (weights * result).sum(), 1 / len(priority))  # what the weights are for


def test_successes_are_stored_with_how_much_better_they_were():
    rule = replay.make("prioritised")
    result = buffer_of(rule, [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert uids(result.buffer) == [(0, [0]), (1, [4, 5, 6]), (2, [8, 9, 10, 11])]
    np.testing.assert_allclose(result.buffer.facts["priority"], [0.75, 0.25, 1e-6])
    later = step(rule, result.buffer, batch([5], [[1, 1, 0, 0]], 1, first_uid=16), 1, prompts=1)
    np.testing.assert_allclose(later.buffer.facts["priority"], [0.75, 0.25, 1e-6, 0.5])


def test_groups_come_as_often_as_their_chances_say_and_carry_their_weights():
    rule = replay.make("prioritised")
    buffer = buffer_of(rule, [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).buffer
    drawn, weights = np.zeros(3), importance(buffer.facts["priority"], 0.6, 0.1)
    for seed in range(150):
        result = buffers.draw(rule, EMPTY.with_facts({}), buffer, 1, 1, 4, np.random.default_rng(seed))
        assert result.buffer is not buffer and uids(result.buffer) == uids(buffer) and result.metrics["replay/age"] == 1
        for stored in result.batches:  # four batches of a group each
            (problem,) = stored.problems
            drawn[problem.id] += 1
            assert stored.facts["replay_weight"] == pytest.approx(weights[problem.id])
    np.testing.assert_allclose(drawn / 600, chances(buffer.facts["priority"], 0.6), atol=0.05)


def test_a_checkpoint_keeps_them():
    rule = replay.make("prioritised")
    buffer = buffer_of(rule, [[1, 0, 0, 0], [1, 1, 1, 0]]).buffer
    stored = json.loads(json.dumps(buffers.encode(buffer)))
    again = buffers.decode(stored, buffers.empty(rule, EMPTY), PROBLEMS, lambda text, problem: text)
    np.testing.assert_array_equal(again.facts["priority"], buffer.facts["priority"])
    assert uids(again) == uids(buffer) and again.facts["priority"].dtype == np.float32
    for seed in range(5):
        one, two = (buffers.take(rule, x, 1, 4, np.random.default_rng(seed))[0] for x in (buffer, again))
        assert uids(one) == uids(two)
        np.testing.assert_array_equal(one.facts["replay_weight"], two.facts["replay_weight"])


def test_an_update_gives_new_priorities():
    """Mean advantages of the trained tokens, within least and 1; they reach the group that has this first uid."""
    rule = replay.make("prioritised")
    advantages = np.float32([[[0.5, 0.25], [1, 1]], [[0, 0], [0, 0]], [[2, 0], [0, 0]]])
    mask = np.array([[[1, 1], [1, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 0]]], bool)
    np.testing.assert_allclose(rule.renew(advantages, mask), [(0.5 + 0.25 + 1) / 3, 1e-6, 1], rtol=1e-6)
    buffer = buffer_of(rule, [[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]).buffer
    assert buffers.group_uids(buffer).tolist() == [0, 4, 9]
    result = buffers.renewed(buffer, np.array([9, 77, 4, 9]), np.float32([0.125, 1, 0.5, 0.25]))
    assert result.facts["priority"].tolist() == [0.75, 0.5, 0.25] and buffer.facts["priority"].tolist() == [0.75, 0.25, 0.25]


def test_uids_travel_as_two_halves():
    uids = np.array([0, 7, 2**31, 2**32 - 1, 5 * 2**32 + 3, 2**45 + 2**31 + 9, -1])
    halves = priorities.words(uids)
    assert halves.dtype == np.int32 and halves.shape == (7, 2) and priorities.uids_of(halves).tolist() == uids.tolist()
    facts = priorities.filled([halves[:2], halves[2:3]], [np.float32([0.5, 0.25]), np.float32([1])], 4)
    assert priorities.uids_of(facts["replayed_groups"]).tolist() == [0, 7, 2**31, -1]
    assert facts["renewed_priorities"].tolist() == [0.5, 0.25, 1, 0]
    assert priorities.uids_of(priorities.filled([], [], 2)["replayed_groups"]).tolist() == [-1, -1]


def test_impossible_settings_are_refused():
    for hyper, words in (({"updates": 0}, "updates=0"), ({"least": 0.0}, "least=0.0")):
        with pytest.raises(ValueError, match=words):
            replay.make("prioritised", **hyper)

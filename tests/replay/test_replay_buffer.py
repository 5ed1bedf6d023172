"""The buffer: additions, drops, replays and saves, on forests written by hand and on random ones."""
import dataclasses
import json
import types

import numpy as np
import pytest

from jaxrl_llm import replay
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.forest import grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.store import pending
from jaxrl_llm.tasks.base import Problem

PROBLEMS = [Problem(f"q{number}", "12", number) for number in range(20)]
EMPTY = plant([], [], ("exact",), answers=True)


def batch(ids, rewards, version, first_uid=0, lengths=None):
    """Groups of one problem each. Token i of trajectory u is 100 u + i, its log-prob -u, its text the uid."""
    result = plant([PROBLEMS[i] for i in ids], [[i + 1] * (i % 3 + 1) for i in ids], ("exact",), answers=True)
    rewards = np.float32(rewards)
    P, G = rewards.shape
    uid = first_uid + np.arange(P * G)
    length = np.full(P * G, 2) if lengths is None else np.ravel(lengths)
    return grow(result, np.repeat(np.arange(P), G), uid, dict(role=Role.POLICY, length=length, stopped=uid % 2 == 0,
                rewards=rewards.ravel(), components=rewards.reshape(-1, 1), texts=[str(u) for u in uid],
                answers=[str(u) for u in uid], tokens=np.concatenate([100 * u + np.arange(n) for u, n in zip(uid, length)]),
                logprobs=-np.repeat(uid, length), entropies=np.repeat(uid, length), version=np.full(length.sum(), version)),
                failures={"exact/error": 1})


def uids(forest):
    """Uids of each prompt, by problem."""
    ends = forest.ends
    return [(problem.id, forest.uid[ends][forest.prompt[ends] == row].tolist()) for row, problem in enumerate(forest.problems)]


def step(rule, buffer, fresh, version, seed=0, prompts=None):
    rng = np.random.default_rng(seed)
    stored, left = buffers.take(rule, buffer, version, prompts or len(fresh.problems) + 1, rng)
    group = int(np.bincount(fresh.prompt[fresh.ends]).max())
    return buffers.mix(rule, fresh, stored, left, version, group, rng)


def same(a, b):
    assert [*a.columns] == [*b.columns]
    for name, left in a.columns.items():
        np.testing.assert_array_equal(left, b.columns[name])
        assert left.dtype == b.columns[name].dtype, name
    assert dataclasses.replace(a, columns={}) == dataclasses.replace(b, columns={})


def test_a_declared_column_is_stored_and_comes_back():
    more = (Column("ranks", "token", np.int16, (2,), fill=-1, to="extras"), Column("level", "prompt", np.int32, fill=5),
            Column("note", "node", object, fill=""))
    nothing = plant([], [], ("exact",), answers=False, columns=more)
    fresh = grow(plant([PROBLEMS[4]], [[1]], ("exact",), answers=False, columns=more), [0, 0], [1, 2], dict(
        role=Role.POLICY, length=[1, 2], stopped=[True] * 2, rewards=[1, 0], components=[[1], [0]], texts=["a", "b"],
        tokens=[7, 8, 9], logprobs=[0] * 3, entropies=[0] * 3, version=[0] * 3,
        ranks=[[1, 2], [3, 4], [5, 6]], note=["x", "y"]))
    rule = replay.make("recent_groups", reuse=1.0)
    first = step(rule, nothing, fresh, 0)
    assert first.buffer.columns["ranks"].tolist() == [[-1, -1], [1, 2], [3, 4], [5, 6]]
    stored = json.loads(json.dumps(buffers.encode(first.buffer)))
    same(buffers.decode(stored, nothing, PROBLEMS, None), first.buffer)
    again, _ = buffers.take(rule, first.buffer, 1, 2, np.random.default_rng(0))
    assert again.columns["note"].tolist() == ["", "x", "y"] and again.columns["level"].tolist() == [5]
    with pytest.raises(ValueError, match="this run keeps the column 'note', which stored rollouts of the checkpoint lack"):
        buffers.decode(buffers.encode(batch([4], [[1, 0]], version=0)), nothing, PROBLEMS, None)


def test_a_waiting_batch_keeps_the_columns_of_its_prompts():
    more = (Column("level", "prompt", np.int32, fill=5), Column("origin", "prompt", object, fill=("web", 1)))
    whole = plant([PROBLEMS[4]], [[1]], ("exact",), answers=False, columns=more)
    source = types.SimpleNamespace(
        planted=lambda rows, draw: plant(rows, [], ("exact",), answers=False, columns=more),
        task=types.SimpleNamespace(train=PROBLEMS), stream=types.SimpleNamespace(partner=types.SimpleNamespace(extract=None)))
    stored = json.loads(json.dumps(pending.encode(Finished(None, whole, {}, {}))))
    again = pending.decode(stored, source).forest
    assert again.columns["level"].tolist() == [5] and again.columns["origin"].tolist() == [["web", 1]]


def test_what_batches_counted_does_not_pile_up():
    fresh = dataclasses.replace(batch([4], [[1, 0]], version=0), seconds=(0.1, 0.2), computed=7, invalid={"late": 1})
    stored = buffers.add(buffers.add(EMPTY, fresh, np.ones(2, bool)), fresh, np.ones(2, bool))
    assert (stored.seconds, stored.computed, dict(stored.invalid)) == ((), 0, {})


def test_rapo_step_by_step():
    """A success of problem 4 returns when all rollouts fail there, with its log-probs, version and text."""
    rule = replay.make("latest_success")
    first = step(rule, EMPTY, batch([4, 0], [[1.1, 1.1, 0.1], [0.1] * 3], version=0), 0)
    assert uids(first.forest) == [(4, [0, 1, 2]), (0, [3, 4, 5])] and uids(first.buffer) == [(4, [1])]
    assert first.metrics == {"replay/size": 1, "replay/share": 0}

    fresh = batch([0, 4, 5], [[0.1] * 3, [0.1] * 3, [0.1, 0.9, 0.1]], version=3, first_uid=6)
    second = step(rule, first.buffer, fresh, 3)
    (zero, four, five) = uids(second.forest)
    assert zero == (0, [6, 7, 8]) and five == (5, [12, 13, 14])
    assert four[1][-1] == 1 and len(four[1]) == 3 and set(four[1][:2]) < {9, 10, 11}
    assert uids(second.buffer) == [(4, [1]), (5, [13])]  # the replayed one is not stored again
    assert second.metrics == {"replay/size": 2, "replay/share": pytest.approx(1 / 9), "replay/age": 3}
    end = second.forest.ends[5]
    assert second.forest.rewards[end] == np.float32(1.1) and second.forest.texts[end] == "1" and not second.forest.stopped[end]
    where = second.forest.offset[end] + np.arange(2)
    assert second.forest.tokens[where].tolist() == [100, 101] and second.forest.logprobs[where].tolist() == [-1, -1]
    assert second.forest.version[where].tolist() == [0, 0] and second.forest.parent[end] == 1
    third = step(rule, second.buffer, batch([4, 9], [[2.0] * 3, [0.0] * 3], version=4, first_uid=20), 4)
    assert uids(third.buffer) == [(5, [13]), (4, [22])]  # the latest success takes the place of the one before
    assert uids(second.buffer) == [(4, [1]), (5, [13])]  # and buffers of earlier steps stay what they were


def test_arpo_visits_of_the_worked_example():
    rule = replay.make("past_success")
    first = step(rule, EMPTY, batch([3], [[1, 0, 0, 0]], version=0, first_uid=1), 0)
    second = step(rule, first.buffer, batch([3], [[0, 0, 0, 0]], version=1, first_uid=5), 1)
    assert uids(second.forest) == [(3, [6, 7, 8, 1])] and uids(second.buffer) == [(3, [1])]
    buffer = second.buffer
    for visit in range(2, 12):
        buffer = step(rule, buffer, batch([3], [[1, 0, 0, 1]], version=visit, first_uid=10 * visit), visit).buffer
    assert sum((group for _, group in uids(buffer)), []) == [80, 83, 90, 93, 100, 103, 110, 113]  # the last eight


def test_a_problem_that_is_drawn_twice_gets_a_success_once():
    buffer = step(replay.make("latest_success"), EMPTY, batch([3], [[1, 1]], version=0), 0).buffer
    result = step(replay.make("latest_success"), buffer, batch([3, 3], [[0, 0], [0, 0]], version=1, first_uid=9), 1).forest
    assert [number for _, group in uids(result) for number in group].count(1) == 1 and len(result.ends) == 4


def test_spear_replays_a_good_rollout_once():
    """Batches of two prompts: with four groups the buffer is full, two of them are learned from, and it is empty again."""
    rule, rng = replay.make("self_imitation", max_age=2), np.random.default_rng(0)
    first = buffers.draw(rule, batch([1, 2], [[1, 0, 0], [1, 1, 0]], version=0), EMPTY, 0, 2, 3, rng)
    assert uids(first.buffer) == [(1, [0]), (2, [3, 4])] and not first.batches
    assert first.metrics == {"replay/size": 3, "replay/share": 0}
    fresh = batch([5, 6], [[1, 0, 0], [0, 1, 0]], version=1, first_uid=6)
    second = buffers.draw(rule, fresh, first.buffer, 1, 2, 3, rng)
    (drawn,) = second.batches
    assert all(group in [(1, [0]), (2, [3, 4]), (5, [6]), (6, [10])] for group in uids(drawn)) and len(uids(drawn)) == 2
    assert not uids(second.buffer) and second.metrics["replay/size"] == 5
    again = buffers.draw(rule, batch([5, 6], [[0, 0], [0, 0]], version=4), first.buffer, 4, 2, 2, rng)
    assert not uids(again.buffer) and not again.batches  # too old for step 4


def test_batches_of_stored_groups_have_at_most_the_prompts_of_a_step():
    rule = replay.Replay(lambda rewards, valid: valid, groups=lambda born, *rest: np.arange(len(born)), max_age=3, updates=2)
    fresh = batch(range(5), [[0, 1]] * 5, version=0)
    result = buffers.draw(rule, fresh, EMPTY, 0, 2, 2, np.random.default_rng(0))
    assert [[number for number, _ in uids(one)] for one in result.batches] == [[0, 1], [2, 3], [4]] * 2
    assert uids(result.buffer) == uids(fresh) and result.metrics == {
        "replay/size": 10, "replay/share": 20 / 30, "replay/age": 0}


def test_groups_of_recent_policies_are_whole_and_leave_one_prompt_to_be_sampled():
    rule = replay.make("recent_groups", reuse=1.0, max_age=2)
    buffer = EMPTY
    for version in range(4):
        buffer = step(rule, buffer, batch([version, version + 1], [[0, 1], [1, 1]], version, 10 * version), version).buffer
    assert [group for _, group in uids(buffer)] == [[20, 21], [22, 23], [30, 31], [32, 33]]
    stored, left = buffers.take(rule, buffer, 4, 3, np.random.default_rng(0))
    assert left is buffer and 1 <= len(stored.problems) <= 2
    assert not len(buffers.take(rule, buffer, 4, 1, np.random.default_rng(0))[0].problems)


@pytest.mark.parametrize("seed", range(6))
def test_capacity_ages_and_copies_of_random_runs(seed):
    """In all cases: at most the capacity, none older than the limit, no rollout twice in a batch or the buffer."""
    rng, rule = np.random.default_rng(seed), replay.Replay(
        lambda rewards, valid: valid & (rewards > 0), lambda rewards, valid, rng: np.where(rewards.max(1) <= 0, 0, -1),
        lambda born, version, prompts, rng: rng.permutation(len(born))[:2], capacity=9, per_prompt=3, max_age=4,
        restarts=bool(seed % 2))
    buffer, born = EMPTY, {}
    for version in range(12):
        fresh = batch(rng.choice(6, 4, replace=False), rng.integers(0, 2, (4, 3)) * rng.integers(0, 2, (4, 1)), version,
                      12 * version, rng.integers(1, 5, (4, 3)))
        born |= dict.fromkeys(range(12 * version, 12 * version + 12), version)
        before = set(buffer.uid[buffer.ends].tolist())
        result = step(rule, buffer, fresh, version, seed=version, prompts=6)
        mixed, buffer = result.forest.uid[result.forest.ends].tolist(), result.buffer
        replayed = [uid for uid in mixed if uid < 12 * version]
        twice = len(mixed) - len(set(mixed))
        assert not twice or not rule.restarts and twice <= 2  # a group that returns whole may contain replayed rollouts
        assert all(len(set(group)) == len(group) for _, group in uids(result.forest)) and set(replayed) <= before
        assert forests.versions(result.forest).tolist() == [born[uid] for uid in mixed]
        stored = buffer.uid[buffer.ends].tolist()
        assert len(stored) == len(set(stored)) <= 9 and result.metrics["replay/size"] == len(stored)
        assert all(version + 1 - born[uid] <= 4 for uid in stored)
        numbers = [problem.id for problem, (_, group) in zip(buffer.problems, uids(buffer)) for _ in group]
        assert max(np.bincount(numbers), default=0) <= 3 and len(buffer.problems) == len(set(buffer.prompt[buffer.ends]))
        assert result.metrics["replay/share"] == pytest.approx(len(replayed) / len(mixed))
        assert not buffer.failures


def test_a_saved_buffer_is_restored_exactly():
    buffer = step(replay.make("past_success"), EMPTY, batch([3, 19], [[1, 0], [1, 1]], 5, lengths=[[3, 1], [2, 7]]), 5).buffer
    stored = json.loads(json.dumps(buffers.encode(buffer)))
    same(buffers.decode(stored, EMPTY, PROBLEMS, lambda text, problem: text), buffer)
    mute = plant([], [], ("exact",), answers=False)
    same(buffers.decode(json.loads(json.dumps(buffers.encode(mute))), mute, PROBLEMS, None), mute)
    flipped = stored["columns"][:200] + ("A" if stored["columns"][200] != "A" else "B") + stored["columns"][201:]
    with pytest.raises(OSError, match="replay buffer of this checkpoint is damaged"):
        buffers.decode(stored | {"columns": flipped}, EMPTY, PROBLEMS, None)
    assert buffers.stored_bytes(rollouts=10, prompt_tokens=3, tokens=5) == 1280


def conversations(rewards, version, first_uid=0):
    """A group of trajectories of problem 3: a turn, an answer and a turn, the first of them in two contexts."""
    whole = plant([PROBLEMS[3]], [[4, 4]], ("success",), answers=False, turns=True)
    for number, reward in enumerate(rewards):
        first, again = len(whole.uid), number == 0
        rows = 4 if again else 3
        own = np.arange(rows) != 1
        whole = grow(
            whole, [0, first, 0, first + 2] if again else [0, first, first + 1], [first_uid + number] * rows, dict(
            prompt=[0] * rows, role=np.where(own, Role.POLICY, Role.ENVIRONMENT), length=[2] * rows, stopped=[True] * rows,
            rewards=[0.0] * (rows - 1) + [reward], components=[[0.0]] * (rows - 1) + [[reward]], answers=None,
            texts=[f"{first_uid + number}.{place}" for place in range(rows)], tokens=np.arange(2 * rows) + 10 * first_uid,
            logprobs=-np.arange(2.0 * rows), entropies=np.zeros(2 * rows), version=np.full(2 * rows, version),
            turn_rewards=[0.25 * one for one in own],
            turn_info=[{"tool_calls": place, "spans": [0, -1], "void": False} if one else {} for place, one in enumerate(own)]))
    return whole


def test_conversations_are_stored_with_all_contexts_and_what_was_said_of_turns():
    rule, nothing = replay.make("recent_groups", reuse=1.0)._replace(
        admit=replay.make("self_imitation").admit), plant([], [], ("success",), answers=False, turns=True)
    fresh = conversations([1, 0, 1], version=2, first_uid=7)
    first = step(rule, nothing, fresh, 2)
    assert uids(first.buffer) == [(3, [7, 9])] and first.buffer.texts.tolist() == [
        "", "7.0", "7.1", "7.2", "7.3", "9.0", "9.1", "9.2"]
    assert first.buffer.parent.tolist() == [-1, 0, 1, 0, 3, 0, 5, 6]
    assert first.buffer.turn_rewards[1:4].tolist() == [0.25, 0, 0.25]
    assert first.buffer.turn_info[4] == {"tool_calls": 3, "spans": [0, -1], "void": False} and first.buffer.turn_info[2] == {}
    stored = json.loads(json.dumps(buffers.encode(first.buffer)))
    same(buffers.decode(stored, nothing, PROBLEMS, None), first.buffer)
    second = step(rule, first.buffer, conversations([0, 0], version=3, first_uid=20), 3)
    assert uids(second.forest) == [(3, [20, 21]), (3, [7, 9])] and second.metrics["replay/age"] == 1
    view = forests.contexts(second.forest, 3, {"tool_calls": "count"}, group=4, prompts=2, tokens=lambda n: n,
                            prompt_tokens=lambda n: n, version=3)
    assert view.extras["traj"][1].tolist() == [0, 0, 1, 0] and view.rewards[1].tolist() == [1, 1, 1, 0]
    assert view.extras["tool_calls"][1].tolist() == [0, 5, 2, 0]


def test_a_conversation_is_replayed_with_its_turns():
    """Grafting keeps chains of nodes, of which forks share the first."""
    other = batch([2], [[1, 1]], version=0)
    other = grow(other, [1, 1], [0, 7], dict(role=[Role.POLICY, Role.ENVIRONMENT], length=[1, 2], stopped=[True, True],
                 rewards=[3, 4], components=[[3], [4]], texts=["a", "b"], answers=[None, None], tokens=[1, 2, 3],
                 logprobs=[0, 0, 0], entropies=[0, 0, 0], version=[4, 4, 4]))
    whole = forests.graft(batch([8, 2], [[0], [0]], version=9, first_uid=50), other, [1])
    assert uids(whole) == [(8, [50]), (2, [51, 1, 0, 7])]
    node, row = forests.chains(whole, whole.ends)
    assert [whole.uid[node[row == r]].tolist() for r in range(5)] == [[50], [51], [1], [0, 0], [0, 7]]
    assert forests.versions(whole).tolist() == [9, 9, 0, 0, 0]
    kept = forests.trim(whole, np.array([True, False, False, False, True]))
    assert uids(kept) == [(8, [50]), (2, [7])] and len(kept.uid) == 5

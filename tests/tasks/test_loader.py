"""Batches: full epochs, shards, and a saved position that continues exactly."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.loader import batches, drawn


@pytest.fixture(scope="module")
def train():
    return tasks.make("arithmetic", level="digit").train  # 82 problems


def ids(iterator, count):
    return [[problem.id for problem in next(iterator)] for _ in range(count)]


def test_each_epoch_has_every_problem_once_in_a_new_order(train):
    stream = sum(ids(batches(train, 41, seed=0), 4), [])
    first, second = stream[:82], stream[82:]
    assert sorted(first) == sorted(second) == list(range(82))
    assert first != second and first != list(range(82))


def test_batches_of_one(train):
    stream = sum(ids(batches(train, 1, seed=0), 164), [])
    assert stream == sum(ids(batches(train, 41, seed=0), 4), [])


def test_restored_position_continues_exactly(train):
    run = batches(train, 8, seed=3)
    ids(run, 7)
    saved = json.dumps(run.get_state())  # 7 * 8 = 56 problems in; the next 12 batches cross an epoch
    rest = ids(run, 12)
    restored = batches(train, 8, seed=3)
    restored.set_state(json.loads(saved))
    assert ids(restored, 12) == rest
    assert json.loads(saved)["next_problem"] == 56
    restored.set_state(json.loads(saved))  # going back works too
    assert ids(restored, 12) == rest


def test_processes_share_each_batch_without_overlap(train):
    whole = ids(batches(train, 8, seed=5), 10)
    shards = [ids(batches(train, 8, seed=5, process_index=i, process_count=4), 10) for i in range(4)]
    assert all(len(batch) == 2 for shard in shards for batch in shard)
    for k, batch in enumerate(whole):
        assert sorted(sum((shard[k] for shard in shards), [])) == sorted(batch)
    seen = [set(sum(shard, [])) for shard in shards]  # 80 of 82 problems: within the first epoch no two processes share one
    assert sum(map(len, seen)) == len(set.union(*seen)) == 80


def test_a_position_saved_by_one_process_is_good_for_two(train):
    run = batches(train, 8, seed=5)
    ids(run, 3)
    expected = ids(batches(train, 8, seed=5), 4)[3]
    shards = [batches(train, 8, seed=5, process_index=i, process_count=2) for i in range(2)]
    for shard in shards:
        shard.set_state(run.get_state())
    assert sorted(sum((ids(shard, 1)[0] for shard in shards), [])) == sorted(expected)


def test_any_number_is_taken_from_one_order(train):
    stream = sum(ids(batches(train, 41, seed=0), 4), [])
    run, counts, got = batches(train, 8, seed=0), (3, 1, 8, 5, 60, 0, 40), []
    for count in counts:
        got += [problem.id for problem in run.take(count)]
        restored = batches(train, 8, seed=0)
        restored.set_state(json.loads(json.dumps(run.get_state())))
        assert restored.number == run.number
        run = restored
    assert got == stream[:117] and run.get_state()["next_problem"] == 117 and run.number == len(counts)
    assert [problem.id for problem in next(run)] == stream[117:125]
    shards = [batches(train, 8, seed=0, process_index=i, process_count=2) for i in range(2)]
    for start, count in ((0, 3), (3, 4), (7, 1)):  # each share begins with the process whose number is 0
        wanted = stream[start:start + count]
        assert [[problem.id for problem in shard.take(count)] for shard in shards] == [wanted[::2], wanted[1::2]]


def test_batch_larger_than_the_data(train):
    (batch,) = ids(batches(train, 200, seed=0), 1)
    assert len(batch) == 200 and sorted(batch[:82]) == list(range(82))


def test_seeds_differ(train):
    assert ids(batches(train, 8, seed=0), 1) != ids(batches(train, 8, seed=1), 1)


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": 6, "process_count": 4}, "batch_size=6 problems cannot be shared by 4 processes"),
    ({"batch_size": 0}, "positive multiple of 1"),
    ({"batch_size": 4, "process_index": 2, "process_count": 2}, "process_index=2 is not in 0..1"),
])
def test_bad_arguments(train, options, message):
    with pytest.raises(ValueError, match=message):
        batches(train, seed=0, **options)


def test_empty_source_and_foreign_state(train):
    with pytest.raises(ValueError, match="no problems"):
        batches([], 4, seed=0)
    state = batches(train, 8, seed=0).get_state()
    with pytest.raises(ValueError, match="seed=0, this run has seed=1"):
        batches(train, 8, seed=1).set_state(state)
    with pytest.raises(ValueError, match="problems=82, this run has problems=10"):
        batches([train[i] for i in range(10)], 8, seed=0).set_state(state)


@pytest.mark.parametrize("change", [{"answer": "7"}, {"prompt": "1+1="}, {"extra": {"tests": [{"output": "7"}]}},
                                    {"extra": {"answers": ["7", "seven"]}}, {"extra": {"box": [0, 0, 1, 1]}}])
def test_a_position_of_other_prompts_answers_or_tests_is_refused(train, change):
    state = json.loads(json.dumps(batches(train, 8, seed=0).get_state()))
    problems = [train[i] for i in range(82)]
    same = [dataclasses.replace(problem, place="elsewhere", extra={"by": "me"}) for problem in problems]
    batches(same, 8, seed=0).set_state(state)
    problems[3] = dataclasses.replace(problems[3], **change)
    with pytest.raises(ValueError, match="other prompts or answers, or what rewards read in their place, than those"):
        batches(problems, 8, seed=0).set_state(state)
    with pytest.raises(ValueError, match="or another order"):
        batches(same[::-1], 8, seed=0).set_state(state)
    chat = [tuple(order({"role": "user", "content": "1+1="}.items())) for order in (list, reversed)]
    (first, second) = ([tasks.Problem((dict(items),), "2", 0)] for items in chat)
    batches(second, 1, seed=0).set_state(batches(first, 1, seed=0).get_state())  # keys of a table come in another order

    def made(prompt, options):
        return [tasks.Problem(prompt, "x", 0, extra={"gym": ("word_ladder", options)})]

    state_of_gym = batches(made("a", "{}"), 1, seed=0).get_state()
    batches(made("b", "{}"), 1, seed=0).set_state(state_of_gym)  # of one seed, and yet others in another process
    with pytest.raises(ValueError, match="other prompts"):
        batches(made("a", '{"size": 3}'), 1, seed=0).set_state(state_of_gym)
    del state["digest"]  # of an earlier release
    batches(problems, 8, seed=0).set_state(state)


def test_chosen_batches_leave_the_order_as_it_is_and_are_counted(train):
    plain, run = batches(train, 4, seed=3), batches(train, 4, seed=3)
    wanted = ids(plain, 3)
    assert ids(run, 1) == wanted[:1] and run.number == 1
    assert [problem.id for problem in run.chosen(np.array([7, 7, 0, 81]))] == [7, 7, 0, 81] and run.number == 2
    assert ids(run, 1) == wanted[1:2]
    saved = json.loads(json.dumps(run.get_state()))
    assert ids(run, 1) == wanted[2:] and run.number == 4
    restored = batches(train, 4, seed=3)
    restored.set_state(saved)
    assert restored.number == 3 and ids(restored, 1) == wanted[2:]
    shards = [batches(train, 4, seed=3, process_index=i, process_count=2).chosen(np.array([5, 6, 7, 8])) for i in range(2)]
    assert [[problem.id for problem in shard] for shard in shards] == [[5, 7], [6, 8]]
    with pytest.raises(IndexError):
        run.chosen(np.array([0, 1, 2, 82]))


def test_problems_are_drawn_in_proportion_to_their_weights():
    weights = np.array([0, 1, 2, 5], np.float32)
    first = np.array([drawn(np.array([1, seed]), 1, weights)[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=4) / 4000
    np.testing.assert_allclose(counts, weights / 8, atol=4 * np.sqrt(0.25 / 4000))
    np.testing.assert_array_equal(drawn(np.array([1, 7]), 1, weights), first[7:8])  # of the same seed the same
    for seed in range(20):
        assert sorted(drawn(np.array([2, seed]), 3, weights)) == [1, 2, 3]  # without replacement while there are others
        seven = np.bincount(drawn(np.array([2, seed]), 7, weights), minlength=4)
        assert seven[0] == 0 and sorted(seven[1:]) == [2, 2, 3]
    assert drawn(np.array([0]), 3, np.array([0, 0, 1.0])).tolist() == [2, 2, 2]
    assert sorted(drawn(np.array([0]), 3, np.zeros(3))) == [0, 1, 2]
    for bad in ([1, -1], [1, np.nan], [np.inf, 1]):
        with pytest.raises(ValueError, match="finite and not negative"):
            drawn(np.array([0]), 1, np.array(bad))

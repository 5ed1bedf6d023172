"""Which problems a source reads: each that fits once in an epoch, whatever is too long, proposed, or drawn in parts."""
import dataclasses
import json

import jax
import numpy as np
import pytest
from streams import BYTES
from test_source import sampled

from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling import fitting, position
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.topologies import refill, single

N, P, G = 23, 4, 2
FIRST = Snapshot(0, {}, None, jax.random.key(0))
PROBLEMS = [Problem("q" + "x" * 9 * (number % 5 == 0), "12", number) for number in range(N)]
FITTING = [number for number in range(N) if number % 5]  # 18


def reading(topology=single(P, group=G)):
    """A source of `PROBLEMS` in batches of P, with completions that are given."""
    made, _, _ = sampled([["12$", "1$"]] * P)
    return dataclasses.replace(made, task=Task("q", PROBLEMS, PROBLEMS, "exact"), data=batches(PROBLEMS, P, seed=1),
                               topology=topology, overlong="skip")


def tried(one, steps, **knobs):
    """i64[steps, N], groups of each problem that a source samples in these steps."""
    return np.array([one.next(FIRST._replace(knobs=knobs)).counts["tried"] for _ in range(steps)]) // G


def resumed(one, topology=single(P, group=G)):
    """A new source that continues where this one is, by what a checkpoint holds."""
    other = reading(topology)
    other.set_position(json.loads(json.dumps(position.jsonable(one.position()))))
    return other


# Draws of 3 are no multiple of the batch; a filter that drops the first draw whole makes two draws of a step.
@pytest.mark.parametrize(("topology", "drawn"), [
    (single(P, group=G), 4), (single(3, group=G), 3), (single(6, group=G), 6),
    (refill(single(3, group=G), 3, keep=lambda part: part.draw > 0, attempts=2), 6)])
def test_every_problem_that_fits_is_sampled_once_in_an_epoch(topology, drawn):
    one, epoch = reading(topology), len(FITTING) // drawn
    whole = tried(one, epoch + 2)
    first = whole[:epoch].sum(0)
    assert (whole.sum(1) == drawn).all() and first.max() == 1 and not first[::5].any()
    if drawn * epoch == len(FITTING):
        assert np.flatnonzero(first).tolist() == FITTING and whole[epoch:].sum(0).max() == 1
    order = [problem.id for problem in batches(PROBLEMS, P, seed=1).take(N)]
    for steps in range(1, epoch + 1):
        one = reading(topology)
        part = tried(one, steps)
        last = max(order.index(number) for number in np.flatnonzero(part.sum(0)))
        assert one.position()["data"]["next_problem"] == last + 1, "nothing is read that is not sampled"
        np.testing.assert_array_equal(np.concatenate([part, tried(resumed(one, topology), epoch + 2 - steps)]), whole)


def test_proposed_problems_come_first_and_others_by_weight_fill_the_batch():
    one = reading()
    proposed = {"prompt_ids": np.array([0, 7, -1, 10])}  # two of these are too long
    batch = tried(one, 1, **proposed)[0]
    assert batch[7] == 1 and batch.sum() == P and batch.max() == 1 and not batch[::5].any()
    assert one.position()["data"]["next_problem"] == 0
    again = resumed(one)
    np.testing.assert_array_equal(tried(one, 3, **proposed), tried(again, 3, **proposed))
    assert len({*map(tuple, tried(again, 9, **proposed).tolist())}) > 4


def test_a_problem_that_is_too_long_is_drawn_once_whatever_its_weight():
    """Others take its place at once: draws of a batch are without replacement."""
    weights = np.full(N, 1e-6)
    weights[[0, 3, 5]] = 1, 1e9, 1e12
    one = reading()
    batch = tried(one, 1, prompt_weights=weights)[0]
    assert batch[3] == 1 and batch.sum() == P and batch.max() == 1 and one.data.number <= 4
    np.testing.assert_array_equal(tried(one, 2, prompt_weights=weights), tried(
        resumed_after(weights), 2, prompt_weights=weights))


def resumed_after(weights):
    """A source resumed after its first batch by these weights."""
    one = reading()
    tried(one, 1, prompt_weights=weights)
    return resumed(one)


def test_a_task_of_which_nothing_fits_is_refused():
    one = dataclasses.replace(reading(), data=batches(PROBLEMS[::5], P, seed=1))
    with pytest.raises(ValueError, match="no prompt of 100 batches fits in prompts.max_tokens=4"):
        one.next(FIRST)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_processes_share_any_number_of_problems(monkeypatch, count):
    """Three processes, of which two read: all get what one alone would, in its order."""
    alone = batches(PROBLEMS, P, seed=1)
    readers = [batches(PROBLEMS, P, seed=1, process_index=i, process_count=2) for i in range(2)]
    for _ in range(4):
        monkeypatch.setattr(fitting.parallel, "gather_objects", lambda mine: [mine])
        wanted = fitting.fitting_problems(alone.take(count), BYTES, 4, "skip")
        shares, sent = [one.take(count) for one in readers], []
        assert len(shares[0]) + len(shares[1]) == count
        monkeypatch.setattr(fitting.parallel, "gather_objects", lambda mine: sent.append(mine) or [mine] * 3)
        for share in shares:
            fitting.fitting_problems(share, BYTES, 4, "skip", processes=2)
        monkeypatch.setattr(fitting.parallel, "gather_objects", lambda mine: [*sent, "read nothing"])
        assert fitting.fitting_problems(shares[0], BYTES, 4, "skip", processes=2) == wanted
        assert all(one.get_state() == alone.get_state() for one in readers)


def test_without_rollouts_the_facts_are_those_that_were_measured_beside_them():
    one = reading().next(FIRST)
    known = {"tried": np.ones(N, np.int32), "reference_rates": np.float32([0.5, np.nan])}
    nothing = one._replace(rollouts=None, forest=one.forest.with_facts({"expected": np.zeros(0)}), counts=known)
    assert nothing.facts.keys() == known.keys()
    some = one._replace(forest=one.forest.with_facts({"expected": np.float32([1, 2, 3, 4])}), counts=known)
    assert some.facts.keys() == {*known, "expected"} and some.facts["expected"].tolist() == [1, 2, 3, 4]

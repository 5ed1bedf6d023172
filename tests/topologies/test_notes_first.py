"""SOPHIA's notes: the worked example of its choice, the plans, and what is left of a batch."""
import numpy as np
from played import play
from test_hint_replaced import encode
from test_topologies import asked, follow

from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies.notes_first import notes_first, selected


def test_the_choice_of_the_worked_example():
    """Only the second note of problem 0 is above 1/2; the shorter of its two right answers is learned."""
    right = np.array([[[1, 0], [1, 1]], [[1, 0], [0, 0]]], bool)
    length = np.array([[[5, 2], [7, 6]], [[1, 1], [1, 1]]])
    rates, chosen = selected(right, length, np.ones((2, 2, 2), bool), 0.5)
    assert rates.tolist() == [[0.5, 1.0], [0.5, 0.0]]
    assert chosen.tolist() == [[[False, False], [False, True]], [[False, False], [False, False]]]
    assert selected(right, length, np.ones((2, 2, 2), bool), 0.4).chosen.reshape(2, 4).tolist() == [
        [True, False, False, False], [True, False, False, False]]
    valid = np.ones((2, 2, 2), bool)
    valid[0, 1, 1] = valid[1, 0, 1] = False  # without the longest answers one each is left
    assert selected(right, length, valid, 0.5).chosen.reshape(2, 4).tolist() == [
        [False, False, True, False], [True, False, False, False]]


def test_answers_follow_notes_and_one_of_each_problem_has_a_reward():
    """Of two notes with three answers each, rollouts 5 to 7 of problem 0 are right, and 3 of problem 1, one of three."""
    topology = notes_first(2, group=2, encode=encode, answers=3)
    plans, forest = follow(topology, lambda problem, number: float(number in ((5, 6, 7), (3,))[problem]))
    assert asked(plans) == [2, {0: 2, 1: 2}, {0: 6, 1: 6}]
    assert bytes(plans[1].acts[0].reads) == b"Take notes on the problem, without an answer.\n\nq"
    assert {bytes(act.reads) for act in plans[2].acts} == {b"q\n\nNotes: \n\nAnswer from the notes.\n\nq"}
    done = topology.finish(forest)
    assert done.rewards[done.ends].tolist() == [0, 0, 0, 1, 0, 0] + [0] * 6
    assert done.uid[done.ends].tolist() == forest.uid[forest.ends].tolist()[2:8] + forest.uid[forest.ends].tolist()[10:]
    assert topology.metrics(done) == {"notes/reward": (1 + 1 / 3) / 4, "notes/good": 0.25}
    assert topology.choose(done).tolist() == [True, True] and topology.most == 8


def test_notes_without_room_get_no_answer():
    topology = notes_first(1, group=2, encode=encode, answer="{notes}" + 49 * "{prompt}", reads=48)
    plans, forest = follow(topology)
    assert len(plans[1].acts[0].reads) == 48 and asked(plans) == [1, {0: 2}]
    done = topology.finish(forest)
    assert not len(done.ends) and not topology.choose(done).any() and topology.metrics(done) == {}


def test_prompts_without_room_get_no_notes():
    """Of two problems the shorter one has room for notes and for an answer."""
    problems = [Problem("q" * 99, "", 0), Problem("q", "", 1)]
    topology = notes_first(2, group=2, encode=encode, answers=1, reads=99)
    plans, forest = play(topology, problems, lambda problem, act, number: 1.0)
    assert asked(plans) == [2, {1: 2}, {1: 2}]
    assert topology.choose(topology.finish(forest)).tolist() == [False, True]
    assert asked(play(topology, problems[:1] * 2, lambda *_: 1.0)[0]) == [2]

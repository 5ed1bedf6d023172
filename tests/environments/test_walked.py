"""Walks along recorded trajectories: matches, patches, scores, traces of problems, held-out walks, and bad input."""
import dataclasses

import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.environments import Turn, base
from jaxrl_llm.environments.walked import step_score
from jaxrl_llm.tasks.base import seeded

WORDS = ["go west", "take key", "go north", "open chest"]  # of the oracle, for the first maze


def walk(words, problem=None, **options):
    environment = environments.make("walked", options={"size": 2, "brief": True}, **options)
    state, _ = base.begin(environment, problem or environment.task.train[0], 5)
    turns = []
    for text in words:
        turns.append(base.advance(environment, state, {"role": "assistant", "content": text}))
        if turns[-1].done:
            break
    return turns


def facts(turns):
    return [(turn.info["step"], turn.info["match"], turn.reward, turn.fresh, turn.done) for turn in turns]


def test_a_perfect_walk_reads_what_the_environment_answers():
    turns = walk([f"I say: {text}." for text in WORDS])
    assert facts(turns) == [(0, 1, 1.0, False, False), (1, 1, 1.0, False, False), (2, 1, 1.0, False, False),
                            (3, 1, 1.0, False, True)]
    inner = environments.make("treasure", size=2, brief=True)
    _, plain = base.replay(inner, inner.task.train[0], 5, [{"role": "assistant", "content": text} for text in WORDS])
    assert [turn.messages for turn in turns[:3]] == [turn.messages for turn in plain[1:4]]


def test_a_patch_replaces_the_message_in_a_history_that_keeps_the_policys_other_ones():
    """The second command is none, the third is one of another direction, the fourth another command."""
    turns = walk(["West: go west", "go nowhere", "go east", "take key"], patches=2)
    assert facts(turns) == [(0, 1, 1.0, False, False), (1, 0, 0.0, True, False), (2, 0, 0.5, True, False),
                            (3, 0, 0.1, False, True)]
    said = [(message["role"], message["content"]) for message in turns[2].messages]
    assert said == [("assistant", "West: go west"), ("user", "north, east. key"), ("assistant", "take key"),
                    ("user", "Taken. north, east. have key"), ("assistant", "go north"),
                    ("user", "east, south. chest. have key")]
    assert facts(walk(["no"], patches=0)) == [(0, 0, 0.0, False, True)]
    assert facts(walk(["no", "no"], patches=1))[-1] == (1, 0, 0.0, False, True)
    assert facts(walk(["go west", "x"], patches=1, longest=2))[-1] == (1, 0, 0.0, False, True)  # nothing is left to walk


def test_held_out_walks_end_at_the_first_other_action_with_the_share_of_those_before():
    problem = environments.make("walked", options={"size": 2, "brief": True}).task.heldout[0]
    words = [message["content"] for message in oracle_of(problem)]
    assert sum(turn.reward for turn in walk(words, problem)) == pytest.approx(1)
    turns = walk([words[0], "no", *words[1:]], problem)
    assert len(turns) == 2 and sum(turn.reward for turn in turns) == pytest.approx(1 / len(words))


def oracle_of(problem):
    inner = environments.make("treasure", size=2, brief=True)
    (state, turn), said = base.begin(inner, problem, 5), []
    while not turn.done:
        said.append({"role": "assistant", "content": inner.oracle(state)})
        turn = base.advance(inner, state, said[-1])
    return said


def spoken(**more):
    """An environment that says no action, so that texts are compared."""
    def step(state, message):
        return Turn([{"role": "user", "content": "Go on."}])

    return environments.Environment(name="spoken", task=seeded("spoken", "Say it.", 3, 1), step=step,
                                    reset=lambda problem, key: ({}, [{"role": "user", "content": "Say."}]), **more)


def traced():
    inner = spoken()
    traces = [{"messages": [{"role": "assistant", "content": "one more"}, {"role": "tool", "content": "Go on."},
                            {"role": "assistant", "content": "two"}]}]
    train = [dataclasses.replace(problem, extra={"traces": traces}) for problem in inner.task.train]
    return dataclasses.replace(inner, task=dataclasses.replace(inner.task, train=train))


def with_message(**message):
    inner = traced()
    train = [dataclasses.replace(problem, extra={"traces": [{"messages": [message]}]}) for problem in inner.task.train]
    return dataclasses.replace(inner, task=dataclasses.replace(inner.task, train=train))


def wordless():
    return with_message(role="tool", content="Go on.")


def calling():
    return with_message(role="assistant", tool_calls=[{"function": {"name": "go", "arguments": "{}"}}])


def test_a_held_out_problem_without_a_trace_is_named():
    environment = environments.make("walked", environment="test_walked:traced")
    with pytest.raises(ValueError, match="problem 3 has no trace to walk along"):
        base.begin(environment, environment.task.heldout[0], 0)


def test_a_trace_of_the_problem_is_walked_along_and_texts_are_compared_without_an_action():
    environment = environments.make("walked", environment="test_walked:traced")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    turns = [base.advance(environment, state, {"role": "assistant", "content": text}) for text in (" one more\n", "three")]
    assert facts(turns) == [(0, 1, 1.0, False, False), (1, 0, 0.1, False, True)]
    state, _ = base.begin(environment, environment.task.train[0], 0)
    assert base.advance(environment, state, {"role": "assistant", "content": "one less"}).reward == 0.5


def test_scores():
    flags = (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)
    np.testing.assert_allclose([step_score(*one) for one in flags], [0, 0.1, 0.5, 1.0])


@pytest.mark.parametrize("options, message", [
    ({"patches": -1}, "patches=-1"), ({"longest": 0}, "longest=0"),
    ({"environment": "skill_chain", "options": {"unsafe": True}, "patches": 1}, None),
    ({"environment": "memory_use", "options": {"tools": ("calculator",)}}, "begins contexts"),
    ({"environment": "test_walked:spoken"}, "neither"), ({"environment": "test_walked:wordless"}, "without a message"),
    ({"environment": "test_walked:calling"}, "messages have 'tool_calls'; give their 'content' each call")])
def test_bad_input(options, message):
    if message is None:
        assert environments.make("walked", **options).contexts == 2
        return
    with pytest.raises(ValueError, match=message.replace("neither", "no oracle, and its problems no extra")):
        environment = environments.make("walked", **options)
        base.begin(environment, environment.task.train[0], 0)

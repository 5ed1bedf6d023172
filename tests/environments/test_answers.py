"""Asynchronous environments answer beside the sampler: steps in order of completion, with the usual faults and losses."""
import threading
import time

import pytest

from jaxrl_llm import environments
from jaxrl_llm.environments import Environment, Turn
from jaxrl_llm.environments.answers import Answers
from jaxrl_llm.environments.runner import Runner, TooManyInvalid
from jaxrl_llm.rewards.pool import cores
from jaxrl_llm.tasks.base import seeded

GATES: dict[str, threading.Event] = {}


def gated(*, waits: bool = True) -> Environment:
    """Answers a message once the gate of its name is open; "raise" raises."""
    def step(state, message):
        if message["content"] == "raise":
            raise KeyError("lost")
        assert GATES[message["content"]].wait(20)
        return Turn([{"role": "user", "content": message["content"]}])

    return Environment(name="gated", task=seeded("gated", "Say.", 20, 5), step=step, waits=waits, replayable=False,
                       reset=lambda problem, key: ({}, [{"role": "user", "content": "Say."}]))


def opened(count, waits=True, limit=1.0):
    runner = Runner("test_answers:gated", {"waits": waits}, seed=0, kind="threads", workers=4, deadline=30.0, limit=limit)
    runner.reset({uid: runner.environment.task.train[uid] for uid in range(count)})
    return Answers(runner), runner


def say(text):
    return {"role": "assistant", "content": text}


def both(answers):
    """The results of two steps in flight, together or one after the other."""
    result = answers.ready(wait=True)
    return result if len(result) == 2 else result | answers.ready(wait=True)


def test_steps_wait_beside_each_other():
    GATES.update(a=threading.Event(), b=threading.Event())
    answers, _ = opened(3)
    answers.ask({0: say("a"), 1: say("a")})
    answers.ask({2: say("b")})
    assert answers.ready(wait=False) == {}
    GATES["b"].set()  # the step requested last ends first
    result = answers.ready(wait=True)
    assert list(result) == [2] and result[2].messages[0]["content"] == "b"
    GATES["a"].set()
    assert sorted(both(answers)) == [0, 1]
    assert answers.ready(wait=True) == {}  # no step is in flight


def test_others_answer_at_once():
    GATES["open"] = threading.Event()
    GATES["open"].set()
    answers, _ = opened(1, waits=False)
    answers.ask({0: say("open")})
    assert answers.ready(wait=False)[0].messages[0]["content"] == "open"


def test_lost_trajectories_are_none_and_too_many_an_error():
    GATES["open"] = threading.Event()
    GATES["open"].set()
    answers, runner = opened(2)
    answers.ask({0: say("open"), 1: say("raise")})
    result = both(answers)
    assert result[1] is None and result[0] is not None and dict(runner.counts) == {"gated/error": 1}
    answers, _ = opened(2, limit=0.25)
    answers.ask({1: say("raise")})
    with pytest.raises(TooManyInvalid, match="gated/error"):
        answers.ready(wait=True)


def test_many_threads_count_every_loss():
    answers, runner = opened(16)
    for uid in range(16):
        answers.ask({uid: say("raise")})
    lost = {}
    end = time.monotonic() + 20
    while len(lost) < 16 and time.monotonic() < end:
        lost |= answers.ready(wait=True)
    assert set(lost.values()) == {None} and runner.counts["gated/error"] == 16 == len(runner.invalid)


def test_games_and_quick_tools_do_not_wait():
    assert not any(environments.make(name).waits for name in ("guess_number", "tool_use", "memory_use"))


def test_programs_wait_for_a_core_each():
    python = {"tools": {"python": {"unsafe": True}}}
    made = [environments.make(name, **python) for name in ("tool_use", "memory_use")]
    made += [environments.make("skill_chain", unsafe=True), environments.make("purified", options=python)]
    assert [(one.waits, one.at_once) for one in made] == [(True, cores())] * 4

"""Many environments at once: every failure is named, none is a reward, and a failed trajectory can be replayed alone."""
import os

import pytest

from jaxrl_llm import environments, sandbox
from jaxrl_llm.environments import base, worker
from jaxrl_llm.environments.runner import Invalid, Runner, TooManyInvalid

KINDS = ("processes", "threads")
FAULTS = {"raise": "error", "rubbish": "rubbish", "nan": "rubbish"}


def say(text):
    return {"role": "assistant", "content": text}


def make(kind, target="faulty_environments:obedient", **settings):
    return Runner(target, **{"seed": 3, "kind": kind, "workers": 2, "deadline": 20.0, "limit": 1.0, **settings})


def problems(runner, count):
    return {uid: runner.environment.task.train[uid % 10] for uid in range(count)}


@pytest.fixture
def runner(request):
    runner = make(**request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize("runner", [{"kind": kind} for kind in KINDS], indirect=True, ids=KINDS)
def test_conversations_side_by_side(runner):
    opened = runner.reset(problems(runner, 5))
    assert [opened[uid].messages[0]["content"] for uid in range(5)] == [f"problem {uid}" for uid in range(5)]
    for _ in range(2):
        turns = runner.step({uid: say(f"hello {uid}") for uid in (4, 2, 0)})
        assert list(turns) == [4, 2, 0]
    assert turns[2].messages[0]["content"].split() == [str(base.key_of(3, 2)), *["hello", "2"] * 2] and turns[2].reward == 0.25
    turns = runner.step({2: say("bye"), 1: say("bye")})
    assert turns == {2: base.Turn([], 0.5, True, {"turns": 3}), 1: base.Turn([], 0.5, True, {"turns": 1})}
    assert runner.invalid == {} and not runner.counts
    with pytest.raises(ValueError, match="trajectory 2 is not running: it has ended, or has never been opened"):
        runner.step({2: say("more")})
    with pytest.raises(ValueError, match=r"trajectories \[2, 3\] are already opened"):
        runner.reset({2: None, 3: None})
    assert [turn.reward for turn in runner.replay(2)] == [0.0, 0.25, 0.25, 0.5]
    assert runner.recording(0).said == [say("hello 0")] * 2
    runner.forget()
    assert runner.recording(0).said and runner.reset({2: runner.environment.task.train[0]})[2].messages


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_invalid_trajectories_and_the_others_continue(kind):
    runner = make(kind, retries=0)
    faults = {**FAULTS, "die": "crash"} if kind == "processes" else FAULTS
    try:
        runner.reset(problems(runner, len(faults) + 1))
        turns = runner.step({uid: say(text) for uid, text in enumerate([*faults, "fine"])})
        assert list(turns) == [len(faults)] and turns[len(faults)].messages[0]["content"].split()[1] == "fine"
        assert {uid: result.kind for uid, result in runner.invalid.items()} == dict(enumerate(faults.values()))
        assert {result.turn for result in runner.invalid.values()} == {1}
        assert runner.counts == {f"obedient/{kind}": list(faults.values()).count(kind) for kind in faults.values()}
        assert "KeyError: 'no such drawer'" in runner.invalid[0].message and "allowed is Turn" in runner.invalid[1].message
        with pytest.raises(KeyError, match="no such drawer"):
            runner.replay(0)
        with pytest.raises(base.Rubbish):
            runner.replay(1)
        with pytest.raises(ValueError, match="trajectory 0 is not running: it is invalid .KeyError"):
            runner.step({0: say("fine")})
        assert runner.step({len(faults): say("bye")})[len(faults)].done
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_hangs_is_given_up_and_the_others_continue(kind):
    runner = make(kind, deadline=5.0, retries=0)
    try:
        runner.reset(problems(runner, 3))
        assert list(runner.step({0: say("hang"), 1: say("a"), 2: say("b")})) == [1, 2]
        assert runner.invalid[0].kind == "timeout" and "no result within 5 s" in runner.invalid[0].message
        assert runner.seconds.count(5.0) == 1 and len(runner.seconds) == 6, "a call that was given up counts as the deadline"
        assert runner.counts == {"obedient/timeout": 1} and runner.step({1: say("bye"), 2: say("bye")}).keys() == {1, 2}
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_is_timed(kind):
    runner = make(kind)
    try:
        runner.reset(problems(runner, 3))
        runner.step({0: say("a"), 1: say("slow"), 2: say("b")})
        assert len(runner.seconds) == 6 and max(runner.seconds) >= 0.5 and min(runner.seconds) >= 0
        runner.forget()
        assert not runner.seconds
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_once_is_tried_again_from_the_same_state(kind, tmp_path):
    runner = make(kind, options={"folder": str(tmp_path)}, retries=1)
    try:
        runner.reset(problems(runner, 2))
        runner.step({0: say("a"), 1: say("b")})
        turn = runner.step({0: say("once")})[0]
        assert turn.messages[0]["content"].split()[1:] == ["a", "once"], "the failed attempt leaves no state"
        assert not runner.invalid
    finally:
        runner.close()
    runner = make(kind, options={"folder": str(tmp_path)}, retries=0)
    try:
        runner.reset(problems(runner, 1))
        runner.step({0: say("once more")})
        assert runner.invalid[0] == Invalid("error", 1, "ConnectionError: the server is away")
    finally:
        runner.close()


def test_a_killed_process_takes_no_other_trajectory_with_it():
    runner = make("processes", workers=1, retries=0)
    def process(turn):
        return int(turn.messages[0]["content"].split()[-1])
    try:
        runner.reset(problems(runner, 4))
        before = process(runner.step({0: say("a"), 1: say("x"), 2: say("y"), 3: say("pid")})[3])
        assert list(runner.step({1: say("die"), 0: say("b"), 2: say("z")})) == [0, 2]
        after = runner.step({0: say("pid")})[0]
        assert after.messages[0]["content"].split()[1:-1] == ["a", "b", "pid"], "played again by another process"
        assert len({process(after), before, os.getpid()}) == 3
        assert runner.counts == {"obedient/crash": 1}
    finally:
        runner.close()


def test_abandoned_trajectories_leave_nothing_behind():
    runner = make("threads", retries=0, limit=0.5)
    runner.reset(problems(runner, 4))
    runner.step({0: say("raise"), 1: say("x"), 2: say("bye")})
    assert len(runner._states._kept) == 2
    runner.end([1])
    assert len(runner._states._kept) == 1 and runner.recording(1).said == [say("x")]
    with pytest.raises(ValueError, match="trajectory 1 is not running: it has ended"):
        runner.step({1: say("more")})
    runner.forget()
    assert not runner.invalid and not runner.counts and runner.recording(3).said == []
    with pytest.raises(KeyError):
        runner.recording(0)
    with pytest.raises(TooManyInvalid, match="1 of 1 trajectories are invalid .obedient/error 1., .*uid 3, problem 3"):
        runner.step({3: say("raise")})


def test_too_many_invalid_trajectories_stop_with_one_error():
    runner = make("threads", retries=0, limit=0.25)
    opened = problems(runner, 8)
    runner.reset(opened)
    assert len(runner.step({uid: say("raise" if uid < 2 else "x") for uid in opened})) == 6, "a quarter is allowed"
    with pytest.raises(TooManyInvalid, match=r"3 of 8 trajectories are invalid \(obedient/error 2, obedient/rubbish 1\), more "
                       r"than the share of 0.25; the first: uid 0, problem 0, turn 1, error: KeyError.*`runner.replay\(0\)`"):
        runner.step({2: say("nan"), 3: say("x")})


def test_counts_are_taken_and_the_share_is_one_of_all_since_the_batch_began():
    runner = make("threads", retries=0, limit=0.25)
    opened = problems(runner, 8)
    for uids in ({0, 1, 2, 3}, {4, 5, 6, 7}):
        runner.reset({uid: opened[uid] for uid in uids})
        runner.step({uid: say("raise" if uid in (0, 4) else "bye") for uid in uids})
        counts, seconds = runner.taken()
        assert counts == {"obedient/error": 1} and len(seconds) == 7 and not runner.counts and not runner.seconds
        assert set(runner.invalid) == {0, 4} & {*range(max(uids) + 1)}
    runner.reset({1: opened[1]})  # one that ended is forgotten, a lost one can still be replayed
    assert runner.recording(0).said == [say("raise")]
    with pytest.raises(TooManyInvalid, match=r"3 of 9 trajectories are invalid \(obedient/error 3\), .*the first: uid 0,"):
        runner.step({1: say("raise")})
    runner.forget()
    runner.reset(opened)
    runner.step({0: say("raise"), 1: say("raise")})


def test_an_environment_that_does_not_repeat_is_detected():
    call = ("faulty_environments:forgetful", "{}", environments.make("faulty_environments:forgetful").task.train[0], 1)
    keeps_nothing = worker.States(capacity=0)
    opening = keeps_nothing(*call, [], "")["turn"]
    turn = keeps_nothing(*call, [say("a")], base.digest([opening]))["turn"]
    with pytest.raises(RuntimeError, match="the environment answered differently when it was replayed"):
        keeps_nothing(*call, [say("a"), say("b")], base.digest([opening, turn]))


def test_states_that_cannot_be_made_again_stay_in_threads():
    with pytest.raises(ValueError, match="'obedient' is not replayable, .*use kind='threads'"):
        make("processes", options={"replayable": False})
    runner = make("threads", options={"replayable": False}, retries=5)
    runner.reset(problems(runner, 2))
    assert runner.step({0: say("a"), 1: say("raise")}).keys() == {0}
    assert runner.step({0: say("b")})[0].messages[0]["content"].split()[1:] == ["a", "b"]
    with pytest.raises(ValueError, match="is not replayable: its state cannot be rebuilt"):
        runner.replay(0)


def test_a_worker_remembers_the_last_trajectories():
    some = worker.States(capacity=2)
    environment = environments.make("faulty_environments:obedient")
    call = ("faulty_environments:obedient", "{}")
    openings = {key: some(*call, environment.task.train[0], key, [], "")["turn"] for key in (1, 2, 3)}
    assert [kept[2] for kept in some._kept] == [2, 3]
    state = some._kept[(*call, 3, 0)][2]
    turn = some(*call, environment.task.train[0], 3, [say("x")], base.digest([openings[3]]))["turn"]
    assert state["said"] == ["x"] and some._kept[(*call, 3, 0)][2] is state, "reused, not played again"
    turn = some(*call, environment.task.train[0], 1, [say("x")], base.digest([openings[1]]))["turn"]
    assert turn.messages[0]["content"].split() == ["1", "x"], "forgotten, and played again"
    some(*call, environment.task.train[0], 1, [say("x"), say("bye")], base.digest([openings[1], turn]))
    assert (*call, 1, 0) not in some._kept, "what has ended is not kept"


def test_a_state_is_that_of_the_same_messages():
    """Two trajectories of one key have the same text for all answers of the solver; only their messages distinguish them."""
    problem = environments.make("solver_verifier").task.train[0]
    some, call = worker.States(capacity=2), ("solver_verifier", "{}", problem, 1)
    opening = some(*call, [], "")["turn"]
    asked = some(*call, [say("no idea")], base.digest([opening]))["turn"]
    last = some(*call, [say(problem.answer), say("yes")], base.digest([opening, asked]))["turn"]
    assert (last.reward, last.done) == (1.0, True)


@pytest.mark.slow
@pytest.mark.skipif(bool(sandbox.best().missing), reason="no sandbox with all barriers on this machine")
@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_tools_run_in_runners(kind):
    runner = make(kind, target="tool_use", options={"tools": ["python"], "parser": "fenced"}, deadline=60.0)
    try:
        runner.reset(problems(runner, 2))
        turns = runner.step({uid: say(f"```python\nprint({uid} + 40)\n```") for uid in range(2)})
        assert [turn.messages[0]["content"] for turn in turns.values()] == ["40", "41"]
        answers = {uid: say(runner.recording(uid).problem.answer) for uid in range(2)}
        assert [turn.reward for turn in runner.step(answers).values()] == [1.0, 1.0]
    finally:
        runner.close()


def test_settings():
    for wrong, why in ((dict(kind="process"), "Unknown kind of runner 'process'"), (dict(retries=-1), "retries=-1"),
                       (dict(limit=2.0), "limit=2.0"), (dict(workers=0), "workers=0"), (dict(deadline=0.0), "deadline=0")):
        with pytest.raises(ValueError, match=why):
            make(**{"kind": "threads", **wrong})

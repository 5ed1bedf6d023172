"""Classes in the shape of TRL's environments, through the one adapter."""
import contextlib
import json
import time

import pytest
from faulty_environments import TASK, Drawers, Meeting

from jaxrl_llm import environments
from jaxrl_llm.environments import base, of_methods
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.environments.threads import Threads
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.judge import make_runner


def say(*calls):
    return {"role": "assistant", "content": "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls) or "Done."}


def test_a_trajectory_of_a_class():
    environment = environments.make("faulty_environments:drawers")
    assert environment.name == "Drawers" and [tool["function"] for tool in environment.tools] == [{
        "name": "open_drawer", "description": "Opens a drawer.", "parameters": {
            "type": "object", "required": ["number"], "properties": {
                "number": {"type": "integer", "description": "which one, from 1 to 3"},
                "loudly": {"type": "boolean", "description": "whether with a bang"}}}}]
    state, opening = base.begin(environment, environment.task.train[4], 0)
    assert opening.messages == [{"role": "user", "content": "Find the coin. There are 3 drawers. (Find the coin.)"}]
    turn = base.advance(environment, state, say(("open_drawer", {"number": 1, "loudly": True}), ("open_drawer", {"number": 9})))
    assert [(m["role"], m["name"], m["content"]) for m in turn.messages] == [
        ("tool", "open_drawer", "A coin!"), ("tool", "open_drawer", "error: there is no such drawer")]
    assert base.advance(environment, state, say()) == base.Turn(
        [], 1.0, True, {"tool_calls": 0, "tool_errors": 0, "malformed": False, "action": None})


def test_turns_run_out_and_objects_are_their_own():
    environment = environments.make("faulty_environments:drawers")
    one, other = (base.begin(environment, environment.task.train[0], 0)[0] for _ in range(2))
    for count in range(3):
        turn = base.advance(environment, one, say(("open_drawer", {"number": 2})))
        assert turn.done == (count == 2)
    assert turn.reward == 0.0 and turn.messages[0]["content"] == "Dust"
    assert base.advance(environment, other, say(("open_drawer", {"number": 1}))).messages[0]["content"] == "A coin"
    for private in ("reset", "get_reward", "_not_a_tool", "__init__"):
        assert "Unknown tool" in base.advance(environment, other, say((private, {}))).messages[0]["content"]
        other.turns = 0


def test_rewards_of_a_class_without_one():
    class Silent:
        def reset(self):
            self.done = True

    with pytest.raises(ValueError, match=r"class Silent has no method get_reward\(\); write one, or give reward="):
        of_methods(Silent, TASK)
    environment = of_methods(Silent, TASK, reward=lambda instance: 0.5 * instance.done)
    state, opening = base.begin(environment, TASK.train[0], 0)
    assert opening.messages[0]["content"] == "Say something." and environment.tools == ()
    assert base.advance(environment, state, say()).reward == 0.5


def test_classes_that_are_no_environments():
    class NoReset:
        def get_reward(self):
            return 0.0

    class Untyped(Drawers):
        def look(self, where):
            """Looks."""

    for factory, why in ((NoReset, "no method reset"), (Untyped, "'where' of tool 'look'")):
        with pytest.raises(ValueError, match=why):
            of_methods(factory, TASK)

    class Pictures(Drawers):
        def reset(self, **row):
            return [{"type": "image"}]

    environment = of_methods(Pictures, TASK)
    with pytest.raises(TypeError, match="Pictures.reset returned .*allowed are a text and None"):
        base.begin(environment, TASK.train[0], 0)


NAMED = {"target": "faulty_environments:Drawers", "task": "faulty_environments:find_the_coin", "turns": 3}
ASYNCHRONOUS = {**NAMED, "target": "faulty_environments:PatientDrawers"}
CALLS = (("open_drawer", {"number": 1, "loudly": True}), ("open_drawer", {"number": 9}))


@pytest.mark.parametrize("options", [NAMED, ASYNCHRONOUS], ids=["plain", "asynchronous"])
def test_a_class_by_name_plays_as_its_factory_does(options):
    environment, made = environments.make("methods_of", **options), environments.make("faulty_environments:drawers")
    assert environment.tools == made.tools and environment.waits == (options is ASYNCHRONOUS)
    said = [say(*CALLS), say()]
    actual, expected = (base.replay(one, one.task.train[4], 0, said)[1] for one in (environment, made))
    assert actual == expected and actual[-1].reward == 1.0
    assert [m["content"] for m in actual[1].messages] == ["A coin!", "error: there is no such drawer"]
    facts = {"tool_calls": 2, "tool_errors": 1, "malformed": False}
    assert {name: actual[1].info[name] for name in facts} == facts


@pytest.mark.slow
@pytest.mark.parametrize("options, pool", [(NAMED, WorkerPool), (ASYNCHRONOUS, Threads)])
def test_a_run_plays_a_class_by_name(options, pool):
    """From a configuration, in the kind of runner that suits the class."""
    config = default_config()
    config.environment = f"methods_of({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    with contextlib.closing(make_runner(config)) as runner:
        assert isinstance(runner._pool, pool)
        runner.reset({3: runner.environment.task.train[0]})
        read = runner.step({3: say(*CALLS)})[3].messages
        assert [message["content"] for message in read] == ["A coin!", "error: there is no such drawer"]
        assert runner.step({3: say()})[3].reward == 1.0


def test_asynchronous_methods_of_several_trajectories_run_at_once():
    options = {"target": "faulty_environments:Meeting", "task": "faulty_environments:find_the_coin",
               "reward": "faulty_environments:how_met"}
    with contextlib.closing(Runner("methods_of", options, seed=0, kind="threads", workers=2)) as runner:
        runner.reset({uid: runner.environment.task.train[uid] for uid in range(2)})
        turns = runner.step({uid: say(("meet", {})) for uid in range(2)})
        assert [turns[uid].messages[0]["content"] for uid in range(2)] == ["Hello."] * 2, "each waited for the other"
        assert runner.step({0: say()})[0].reward == 1.0


def test_an_asynchronous_method_that_is_late_loses_its_trajectory():
    options = {"target": "faulty_environments:Meeting", "task": "faulty_environments:find_the_coin",
               "reward": "faulty_environments:how_met", "deadline": 0.2}
    with contextlib.closing(Runner("methods_of", options, seed=0, kind="threads", limit=1.0, retries=0)) as runner:
        runner.reset({0: runner.environment.task.train[0]})
        assert runner.step({0: say(("meet", {}))}) == {} and runner.invalid[0].kind == "timeout"
        assert runner.invalid[0].message == "Meeting.meet: nothing came back within 0.2 s"
    for _ in range(500):
        if Meeting.barrier.n_waiting:
            time.sleep(0.01)
    assert Meeting.barrier.n_waiting == 0, "it was cancelled"


def test_a_corrected_call_reaches_the_object_before_the_failed_one():
    """The state is rewound: the object of the trajectory is a copy, and so are its tools."""
    environment = environments.make("purified", environment="methods_of", options=NAMED)
    state, _ = base.begin(environment, environment.task.train[0], 0)
    turns = [base.advance(environment, state, say(*calls)) for calls in (
        [("open_drawer", {"number": 2}), ("open_drawer", {"number": 9})], [("open_drawer", {"number": 1})], [])]
    assert [bool(turn.rewritten) for turn in turns] == [False, True, False]
    assert state.inner.instance.opened == [1] and turns[2].reward == 1.0, "drawer 2 was never opened first"


@pytest.mark.parametrize("name", ["recent", "purified"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_environment_around_a_class_that_is_cut_says_its_reward(name, number):
    environment = environments.make(name, environment="methods_of", options=NAMED)
    state, _ = base.begin(environment, environment.task.train[0], 0)
    base.advance(environment, state, say(("open_drawer", {"number": number})))
    assert base.advance(environment, state, base.CUT) == base.Turn(reward=float(number == 1), done=True)


def test_the_last_context_of_an_environment_that_goes_on_has_its_reward():
    environment = environments.make("recent", environment="methods_of", options=NAMED, contexts=2)
    for last, played in ((say(("open_drawer", {"number": 3})), [1, 3]), (say(), [1])):
        state, _ = base.begin(environment, environment.task.train[0], 0)
        first = base.advance(environment, state, say(("open_drawer", {"number": 1})))
        turn = base.advance(environment, state, last)
        assert (first.reward, turn.reward, turn.done, turn.messages) == (0.0, 1.0, True, [])
        assert state.inner.instance.opened == played
    treasure = environments.make("recent", options={"size": 2}, contexts=2)
    state, _ = base.begin(treasure, treasure.task.train[0], 0)
    assert [base.advance(treasure, state, say()).done for _ in range(2)] == [False, True]


@pytest.mark.parametrize("changes, error, why", [
    ({"target": "Drawers"}, ValueError, "class 'Drawers' names no function; write module:function"),
    ({"target": "faulty_environments:Drawer"}, ValueError, "Did you mean 'Drawers'"),
    ({"task": "arithmetik"}, ValueError, "Did you mean"),
    ({"target": "faulty_environments:Meeting"}, ValueError, r"class Meeting has no method get_reward\(\)"),
    ({"reword": "x"}, ValueError, "Did you mean 'reward'")])
def test_names_that_are_not_there(changes, error, why):
    with pytest.raises(error, match=why):
        environments.make("methods_of", **{**NAMED, **changes})

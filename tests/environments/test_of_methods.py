"""Classes in the shape of TRL's environments, through the one adapter."""
import json

import pytest
from faulty_environments import TASK, Drawers

from jaxrl_llm import environments
from jaxrl_llm.environments import base, of_methods


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

    class Asynchronous(Drawers):
        async def wait(self, seconds: int):
            """Waits."""

    class Untyped(Drawers):
        def look(self, where):
            """Looks."""

    for factory, why in ((NoReset, "no method reset"), (Asynchronous, "'wait' is asynchronous"),
                         (Untyped, "'where' of tool 'look'")):
        with pytest.raises(ValueError, match=why):
            of_methods(factory, TASK)

    class Pictures(Drawers):
        def reset(self, **row):
            return [{"type": "image"}]

    environment = of_methods(Pictures, TASK)
    with pytest.raises(TypeError, match="Pictures.reset returned .*allowed are a text and None"):
        base.begin(environment, TASK.train[0], 0)

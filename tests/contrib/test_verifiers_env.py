"""Tasksets and environments of verifiers, by the ids of the modules in this folder."""
import json

import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import base

vf = pytest.importorskip("verifiers.v1")


def say(text):
    return {"role": "assistant", "content": text}


def open_drawer(number):
    return say(f'<tool_call>{{"name": "open_drawer", "arguments": {{"number": {number}}}}}</tool_call>')


def play(environment, *messages):
    (state, opening), turns = base.begin(environment, environment.task.train[1], 0), []
    for message in messages:
        turns.append(base.advance(environment, state, message))
    return opening, turns


@pytest.fixture(scope="module")
def drawers():
    return environments.make("verifiers_env", taskset="vf-drawers", heldout=4, returns=(0.0, 1.5))


def test_a_taskset_with_a_toolset(drawers):
    assert (len(drawers.task.train), len(drawers.task.heldout), drawers.task.train[1].answer) == (8, 4, "2")
    assert [tool["function"]["name"] for tool in drawers.tools] == ["open_drawer"] and drawers.waits
    opening, turns = play(drawers, open_drawer(2), say("2"))
    assert opening.messages == [{"role": "system", "content": "Open drawers."}, {"role": "user", "content": "Where is coin 1?"}]
    assert turns[0].messages == [{"role": "tool", "name": "open_drawer", "content": "A coin."}] and turns[0].reward == 0
    assert turns[1].done and turns[1].reward == 1.5 and turns[1].info["metrics"] == {"drawers": 1.0}, "state is the task's"
    assert play(drawers, say("2"))[1][0].reward == 1.0 and play(drawers, open_drawer(1), say("1"))[1][1].reward == 0.5


def test_calls_that_cannot_be_answered_and_a_stop(drawers):
    wrong = say('<tool_call>{"name": "open_drawr"}</tool_call>')
    _, turns = play(drawers, open_drawer(7), wrong, open_drawer('"two"'), say("2"))
    texts = [turn.messages[0]["content"] for turn in turns[:-1]]
    assert all(text.startswith("error:") for text in texts) and "Did you mean 'open_drawer'" in texts[1]
    assert "allowed is integer" in texts[2] and turns[-1].reward == 1.0
    _, turns = play(drawers, *[open_drawer(1)] * 4)
    assert [turn.done for turn in turns] == [False, False, False, True] and turns[-1].reward == 0.0


def test_two_agents_of_an_environment():
    environment = environments.make("verifiers_env", taskset="vf-duel", heldout=2)
    opening, turns = play(environment, say("3"), say("5"), say("4"))
    assert opening.messages == [{"role": "user", "content": "Round 1: say a number."}]
    assert [message["content"] for message in turns[0].messages] == ["Round 1: say a number.", "The other says 3."]
    assert [message["content"] for message in turns[1].messages] == ["The other says 5."]
    assert [turn.info["agent"] for turn in turns] == [0, 1, 0] and turns[2].info["returns"] == [0.0, 1.0]
    assert turns[2].done and turns[2].reward == 0.5
    _, turns = play(environment, say("3"), say("x"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        play(environment, say("3"), say("x"), say("4"))


def test_an_episode_that_the_run_cuts_is_scored(drawers):
    """Half for one opened drawer, without an answer; and the first agent's number, where the second one says nothing."""
    assert play(drawers, open_drawer(2), base.CUT)[1][-1] == base.Turn(reward=0.5, done=True)
    environment = environments.make("verifiers_env", taskset="vf-duel", heldout=2)
    assert play(environment, say("3"), base.CUT)[1][-1] == base.Turn(reward=0.5, done=True)


def test_the_audit(capsys):
    options = {"taskset": "vf-drawers", "heldout": 4, "returns": [0.0, 1.5], "replayable": True}
    assert audit.main(["verifiers_env", f"--options={json.dumps(options)}", "--trajectories=6"]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_refusals(monkeypatch):
    import vf_drawers
    with pytest.raises(ModuleNotFoundError, match="taskset 'no-such-taskset' not found"):
        environments.make("verifiers_env", taskset="no-such-taskset")
    monkeypatch.setattr(vf_drawers.DrawersTask, "NEEDS_CONTAINER", True)
    with pytest.raises(ValueError, match="run in containers, which are not started here"):
        environments.make("verifiers_env", taskset="vf-drawers", heldout=4)
    monkeypatch.setattr(vf_drawers.DrawersTask, "NEEDS_CONTAINER", False)

    @vf.reward
    async def looks(self, runtime) -> float:
        return 1.0

    monkeypatch.setattr(vf_drawers.DrawersTask, "looks", looks, raising=False)
    with pytest.raises(ValueError, match="the reward 'looks' of DrawersTask looks into a runtime"):
        environments.make("verifiers_env", taskset="vf-drawers", heldout=4)

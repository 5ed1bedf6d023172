"""Environments of OpenEnv: a real server of the package on loopback, which hangs, raises and ends."""
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import background, base
from jaxrl_llm.environments.runner import Runner

pytest.importorskip("openenv")


def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(Path(__file__).parent / "openenv_app.py"), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield {"url": f"http://127.0.0.1:{port}", "deadline": 20.0}
    finally:
        process.kill()
        process.wait()


def test_sessions_of_a_server(server, capsys):
    environment = environments.make("openenv_server", **server, action="number", observation="text", rules="Guess.")
    problem = environment.task.train[3]
    hidden = random.Random(3).randint(1, 9)
    state, opening = base.begin(environment, problem, 0)
    other, _ = base.begin(environment, environment.task.train[4], 0)
    assert opening.messages == [{"role": "user", "content": "Guess.\n\nA number from 1 to 9."}]
    assert base.advance(environment, state, say("0")).messages == [{"role": "user", "content": "Higher."}]
    last = base.advance(environment, state, say(str(hidden)))
    assert (last.reward, last.done, last.messages[0]["content"]) == (1.0, True, "Right.")
    assert base.advance(environment, other, say(str(random.Random(4).randint(1, 9)))).done, "a session of its own"
    short = environments.make("openenv_server", **server, action="number", observation="text", turns=1)
    cut = base.replay(environments.make("openenv_server", **server, action="number", turns=1, replayable=True),
                      problem, 0, [say("0")])[1][-1]
    assert cut.done and cut.info["truncated"] and json.loads(cut.messages[0]["content"]) == {"text": "Higher.", "tries": 1}
    assert base.begin(short, problem, 0)[1].messages[0]["content"] == "A number from 1 to 9."

    whole = environments.make("openenv_server", **server)
    state, _ = base.begin(whole, problem, 0)
    for text, why in (("hello", "as a JSON object"), ("{1}", "not valid JSON"), ('{"digit": "1"}', "Invalid message")):
        turn = base.advance(whole, state, say(text))
        assert turn.info["refused"] and why in turn.messages[0]["content"] and not turn.done
    assert base.advance(whole, state, say('I say {"number": "0"}.')).info == {"refused": False, "truncated": False}
    with pytest.raises(ValueError, match="no field 'words'; it has"):
        base.begin(environments.make("openenv_server", **server, observation="words"), problem, 0)
    options = json.dumps({**server, "action": "number", "observation": "text", "replayable": True, "turns": 5})
    assert audit.main(["openenv_server", f"--options={options}", "--trajectories=6"]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_a_session_that_was_closed_is_not_begun_again(server):
    environment = environments.make("openenv_server", **server, action="number", observation="text")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    assert base.advance(environment, state, say("0")).messages[0]["content"] == "Higher."
    background.wait(state.client.value._ws.close(), 20.0, "the session")
    for _ in range(2):
        with pytest.raises(base.Died, match="has closed the session"):
            base.advance(environment, state, say("0"))


def test_a_server_that_does_not_answer_is_named():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ValueError, match="Start it first"):
            environments.make("openenv_server", url=f"http://127.0.0.1:{silent.getsockname()[1]}", deadline=0.5)


def test_a_server_that_hangs_raises_and_ends_loses_trajectories(server):
    options = {**server, "deadline": 5.0, "action": "number", "observation": "text"}
    runner = Runner("openenv_server", options, seed=0, kind="threads", limit=1.0)
    try:
        runner.reset({uid: runner.environment.task.train[uid] for uid in range(4)})
        turns = runner.step({0: say("hang"), 1: say("raise"), 2: say("0")})
        assert list(turns) == [2] and {uid: lost.kind for uid, lost in runner.invalid.items()} == {0: "timeout", 1: "error"}
        assert "no such number" in runner.invalid[1].message
        runner.step({3: say("die")})
        runner.step({2: say("0")})
        assert runner.invalid[3].kind == runner.invalid[2].kind == "crash"
        runner.reset({4: runner.environment.task.train[4]})
        assert runner.invalid[4].kind == "crash" and "Failed to connect" in runner.invalid[4].message
    finally:
        runner.close()
    with pytest.raises(ValueError, match="Start it first, say by `uvicorn"):
        environments.make("openenv_server", **server)

"""Runs in environments of other packages; each is skipped if its package is not installed."""
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import chatter
import numpy as np
import pytest
import run_files

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup

ROOM = Path(__file__).parents[1] / "contrib"


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOM))  # environments of the tests, also for the processes of a run


@pytest.fixture
def served():
    """Starts a server of the tests on a free port of loopback."""
    processes = []

    def start(script):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes.append(subprocess.Popen([sys.executable, str(ROOM / script), str(port)], stderr=subprocess.DEVNULL))
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.2)
        raise TimeoutError(script)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def needs(module):
    try:
        result = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package in which it would be
        result = False
    if not result:
        pytest.skip(f"{module} is not installed")


def learned(workdir, **changes):
    """The lines of two steps; each step changes the policy or has groups of equal rewards."""
    shape = {"prompts.max_tokens": 64, "sampling.max_tokens": 160, "sampling.max_turns": 3, "sampling.turn_tokens": 8,
             "sampling.observation_tokens": 48, "steps": 2, "eval.problems": 2, "eval.every": 2}
    loop.train(chatter.get_config(**{**shape, **changes}), workdir)
    lines = run_files.lines(workdir)[1:]
    assert len(lines) == 2
    for line in lines:
        assert line["skipped_updates"] == 0 and line["environment/invalid"] == 0 and line["environment/turns"] >= 1
        assert line["max/mismatch"] < 1e-4
    return lines


@pytest.mark.slow
def test_the_policy_calls_tools_of_a_server_as_the_oracle_showed_it(served, tmp_path):
    needs("mcp.server.mcpserver")
    url = served("mcp_server.py")
    environment = (f"mcp_tools(servers={{'drawers': '{url}/mcp'}}, tools=['calculator'], shared=True, deadline=60.0, "
                   "parser='llama3', options={'level': 'mul', 'chat': True})")
    learned(tmp_path, environment=environment, **{"sampling.turn_tokens": 80, "sampling.max_tokens": 240, "warmup.steps": 4,
                                                  "warmup.batch": 4})
    rows = [json.loads(line) for line in (tmp_path / "samples/step_000002.jsonl").read_text().splitlines()]
    assert rows and all(row["messages"][0]["role"] == "assistant" for row in rows)


@pytest.mark.slow
def test_a_server_of_openenv(served, tmp_path):
    needs("openenv")
    learned(tmp_path, environment=f"openenv_server(url='{served('openenv_app.py')}', action='number', observation='text')")


@pytest.mark.slow
def test_a_taskset_of_verifiers(tmp_path):
    needs("verifiers")
    learned(tmp_path, environment="verifiers_env(taskset='vf-drawers', heldout=4, returns=(0.0, 1.5))")


@pytest.mark.slow
def test_problems_of_reasoning_gym_in_a_row(tmp_path):
    needs("reasoning_gym")
    environment = ("sequence(task=reasoning_gym, length=2, options={'dataset': 'chain_sum', 'train_size': 40, "
                   "'heldout_size': 8, 'config': {'max_terms': 2, 'max_digits': 1}})")
    learned(tmp_path, environment=environment, **{"prompts.max_tokens": 256, "sampling.max_tokens": 320,
                                                  "sampling.observation_tokens": 256})


@pytest.mark.slow
def test_both_sides_of_a_game_of_textarena(tmp_path):
    needs("textarena")
    lines = learned(tmp_path, environment="textarena_game(game='TicTacToe-v0', turns=4)", method="spiral", **{
        "prompts.max_tokens": 1024, "sampling.max_tokens": 512, "sampling.observation_tokens": 128, "sampling.max_turns": 4})
    assert lines[0]["reward/mean"] == 0


@pytest.mark.parametrize("environment, package", [
    ("chatter:spelled", "numpy"), ("tinker_cookbook_env(dataset='cookbook_bytes:builder', returns=(0.0, 1.5))",
                                   "tinker_cookbook")], ids=["own", "cookbook"])
def test_tokens_reach_the_policy_and_the_learner_as_they_were(environment, package):
    needs(package)
    run, params = setup.build(chatter.get_config(environment=environment, **{"model.chat_template": ""}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    forest, letters = finished.forest, set()
    for row, problem in enumerate(forest.problems):
        opening = bytes(forest.prompt_ids(row).tolist()).decode()
        assert opening.startswith("Say ") and opening.endswith(".\n")
        letters.add(opening[4])
    assert letters <= set("abcdefghij")
    heard = [text for text, role in zip(forest.texts, forest.role) if role == Role.ENVIRONMENT]
    assert heard and set(heard) <= {"Good.\n", "No.\n"}
    for piece in np.flatnonzero(forest.role == Role.ENVIRONMENT):
        start, end = (int(forest.length[:place].sum()) for place in (piece, piece + 1))
        assert bytes(forest.tokens[start:end].tolist()).decode() == forest.texts[piece]
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    assert learned.metrics["skipped_updates"] == 0 and np.isfinite(np.asarray(learned.advantages)).all()
    assert learned.metrics["max/mismatch"] < 1e-4


@pytest.mark.slow
def test_a_run_with_the_tinker_cookbook(tmp_path):
    needs("tinker_cookbook")
    learned(tmp_path, environment="tinker_cookbook_env(dataset='cookbook_bytes:builder', returns=(0.0, 1.5))",
            **{"model.chat_template": ""})

"""Hostile texts, drawn at random, at every parser of calls and at every step of every environment that runs in this process.

No text may raise: a lost trajectory is left out of training, so that a policy would void what it does badly.
With `JAXRL_LLM_FUZZ=300` the tests take ten minutes (`fuzz.py`).
"""
import json
import os
import random
import time
import warnings
from typing import Any

import pytest
from fuzz import SEED, TIMES

from jaxrl_llm import environments, sandbox, tasks
from jaxrl_llm.audits.injections import ATTACKS
from jaxrl_llm.contrib.openenv_server import ActionError, object_of
from jaxrl_llm.environments import base, of_methods, parsers, tools
from jaxrl_llm.environments.purified import similarity
from jaxrl_llm.environments.skill_chain import skills, uses
from jaxrl_llm.environments.tool_use import of_tools
from jaxrl_llm.environments.words import last_word
from jaxrl_llm.tokenizers.messages import unused

TEXTS = 15 * TIMES
NUMBERS = ["7", "-1", "1.5", "5.0", "1e400", "-0.0", "NaN", "Infinity", "9" * 5000, "0x" + "f" * 5000, "1_0", "٣", "1/0",
           "2**9**9"]
DEEP = ["[" * 90 + "]" * 90, "[" * 3000 + "]" * 3000, '{"a":' * 95 + "1" + "}" * 95, "(" * 150 + ")" * 150, "-" * 1500 + "1"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "```python\n", "\n```\n", "```", "<memory>",
         "</memory>", "<answer>", "</answer>", r"\boxed{", "}", "{", "[", "]", "(", ")", ";", '"', "'", "\\", "\\\"", ",", ":",
         "="]
WORDS = ["north", "go north", "LEFT", "yes", "no", "take key", "[5]", "1. alibi", "Ω", "\0", "\ud800", "\x1b[31m", "\r", "\n",
         "\u2028", "\u202e", "def f(x):\n    return x\n", "sum(" + "+".join("1" * 400) + ")", "lambda:" * 200 + "0",
         "f(a)", "f" + "(a)" * 300]


def argument(chance: random.Random) -> str:
    """A value in JSON, or almost."""
    text = json.dumps(chance.choice([*WORDS, *MARKS, *NUMBERS]) * chance.choice([1, 999]))
    return chance.choice([*NUMBERS, *DEEP, "null", "true", text,
                          '"1' + "+1" * 200 + '"', '{"expression": "1"}', '"\\ud800"'])


def call(chance: random.Random) -> str:
    """A call in one of the formats, of a tool that may be there."""
    name = chance.choice(["calculator", "keep", "keep", "none", "\\u0000"])
    key = chance.choice(["x", "expression", "y", "code"])
    value = argument(chance)
    return chance.choice([
        f'<tool_call>{{"name": "{name}", "arguments": {{"{key}": {value}}}}}</tool_call>',
        f'{{"name": "{name}", "parameters": {{"{key}": {value}}}}}', f"[{name}({key}={value})]", f"```python\n{value}\n```",
        f'<tool_call>{{"name": "{name}", "arguments": {value}}}</tool_call>'])


def hostile(chance: random.Random) -> str:
    """A text of marks, words, numbers and calls, some of them many times, or one of the known attacks."""
    pieces = [chance.choice(chance.choice([MARKS, WORDS, NUMBERS, DEEP, ATTACKS]) if chance.random() < 0.6 else [call(chance)])
              for _ in range(chance.choice([1, 1, 2, 4, 9]))]
    return "".join(piece * chance.choice([1, 1, 1, 2, 50 if len(piece) < 100 else 1]) for piece in pieces)


class Notebook:
    """Keeps whatever it is given, in the shape of TRL."""

    def reset(self) -> None:
        self.kept: list[Any] = []

    def keep(self, x: Any) -> list:
        """Keeps a value.

        Args:
            x: the value
        """
        self.kept.append(x)
        return self.kept

    def get_reward(self) -> float:
        return float(len(self.kept))


def keep(x: Any) -> Any:
    """Gives a value back.

    Args:
        x: the value
    """
    return x


def notebook(parser: str = "hermes") -> environments.Environment:
    """An environment whose state holds what the policy wrote."""
    return of_methods(Notebook, tasks.make("arithmetic", chat=True), parser=parser)


def keeping(parser: str = "hermes") -> environments.Environment:
    """A tool that returns what the policy wrote."""
    problems = tasks.make("arithmetic", chat=True)
    return of_tools(problems, [tools.of_function(keep)], name="keep", parser=parser, reward=None, turns=8)


HERE = "test_fuzz_environments:"
SLOW = pytest.mark.slow
CASES: list[Any] = [
    *((name, {"parser": parser}) for name in ("tool_use", HERE + "keeping", HERE + "notebook") for parser in parsers.BY_NAME),
    ("single", {}), ("sequence", {"length": 5}), ("memory_use", {}), ("recent", {}),
    ("recent", {"environment": "tool_use", "thoughts": False}), ("purified", {"retries": 9}),
    ("purified", {"environment": HERE + "notebook", "retries": 9}), ("solver_verifier", {}), ("ranked_list", {}),
    ("guess_number", {}), ("treasure", {}), ("tic_tac_toe", {}),
    ("gymnasium_text", {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}),
    pytest.param("textarena_game", {}, marks=SLOW), pytest.param("textarena_game", {"game": "TicTacToe-v0"}, marks=SLOW)]


@pytest.fixture(autouse=True)
def quietly(monkeypatch):
    """The environments of this file by name; Python's parser warns of what it is given."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def play(environment, texts):
    """Plays trajectories until no text is left."""
    while texts:
        state, _ = base.begin(environment, environment.task.train[0], 0)
        turn = base.Turn()
        while texts and not turn.done:
            turn = base.advance(environment, state, {"role": "assistant", "content": texts.pop(0)})
    return turn


@pytest.mark.parametrize("name, options", CASES)
def test_no_text_voids_a_trajectory(name, options):
    if package := {"gymnasium_text": "gymnasium", "textarena_game": "textarena"}.get(name):
        pytest.importorskip(package)
    chance = random.Random(f"{SEED} {name} {options}")
    play(environments.make(name, **options), [hostile(chance) for _ in range(TEXTS)])


@pytest.mark.parametrize("read", [*parsers.PARSERS.values(), parsers.without_thoughts, skills,
                                  lambda text: uses([text], {"f": ""}),
                                  lambda text: last_word(["1", "left", "-1"], text)])
def test_no_text_stops_a_reader(read):
    chance = random.Random(f"{SEED} readers")
    for _ in range(4 * TEXTS):
        read(hostile(chance))


def action(text):
    """An action of a server, or nothing."""
    try:
        return object_of(text)
    except ActionError:
        return None


def test_no_action_stops_the_client_of_a_server():
    chance = random.Random(f"{SEED} actions")
    for _ in range(10 * TEXTS):
        json.dumps(action(hostile(chance)))


FUNCTIONS = ["def f(x):\n    return " + "+".join("1" * 400), "def f(x):\n    return " + "-" * 1500 + "x",
             "def f(x):\n    return 0x" + "f" * 5000,
             "@staticmethod\ndef f(x):\n    return x  # as it is written"]


def test_functions_that_python_cannot_write_again_are_skills_as_they_were_written():
    for source in FUNCTIONS:
        assert skills(f"import math\r\n{source}\nprint(f(1))") == {"f": source}


@pytest.mark.skipif(bool(sandbox.best().missing), reason="programs cannot run here")
def test_programs_that_python_cannot_write_again_earn_0_and_do_not_void():
    environment = environments.make("skill_chain")
    answer = environment.task.train[0].extra["answers"][0]
    for source in FUNCTIONS[:3]:
        state, _ = base.begin(environment, environment.task.train[0], 0)
        said = [base.advance(environment, state, {"role": "assistant", "content": text})
                for text in (f"```python\n{source}\n```", answer)]
        assert said[1].reward == 0.5 and said[1].messages[0]["content"].startswith(f"Functions that you can call:\n{source}")


def test_arguments_in_the_state_of_an_environment_can_be_copied():
    """`purified` copies the state before each call, and with it what earlier calls put there."""
    nested = '<tool_call>{"name": "keep", "arguments": {"x": %s}}</tool_call>'
    turns = [nested % ("[" * depth + "]" * depth) for depth in (99, 400, 900)] + ["7"]
    assert play(environments.make("purified", environment=HERE + "notebook"), turns).reward == 1.0  # the deeper two are refused


UNITS = ["<tool_call>", "</think>", "<tool_call>\"", "<tool_call>x</think>", "<tool_call>{\"name\": \"a\"}</tool_call>",
         '{"name": "a"};', '{"name": "a"}; ', "</think>{\"", "</think>f('", "```python\n",
         "```python\n\"</think>\"\n```\n", "{", "[", "\\", "'\\", "7 ", "7", "-1.",
         "\n", "<memory>", "</memory>", "[5]", "go north ", "def f(): 0\n", "yes", " "]


def assert_linear(read, unit):
    """Processor time at four times the length is less than ten times as much; sixteen would be quadratic."""
    def seconds(length):
        text, start = unit * (length // len(unit)), time.process_time()
        read(text)
        return max(time.process_time() - start, 0.02)  # below is noise

    tries = [(seconds(20_000), seconds(80_000))]
    while tries[-1][1] >= 10 * tries[-1][0] and len(tries) < 3:  # a busy machine slows a single try
        tries.append((seconds(20_000), seconds(80_000)))
    assert tries[-1][1] < 10 * tries[-1][0], (unit, tries)


def marked(text):
    """A mark for a text that holds numbered marks, the last number first."""
    return unused("".join(f"\ue0a1{number}\ue0a2" for number in reversed(range(len(text) // 6))))


@pytest.mark.parametrize("read", [*parsers.PARSERS.values(), action, skills, marked,
                                  lambda text: last_word(["1", "left"], text), lambda text: similarity(text, text[::-1] + "x")])
def test_readers_take_linear_time(read):
    for unit in UNITS:
        assert_linear(read, unit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tool_use", "memory_use", "ranked_list", "guess_number", "treasure", "tic_tac_toe",
                                  "solver_verifier"])
def test_steps_take_linear_time(name):
    environment = environments.make(name)
    for unit in UNITS:
        assert_linear(lambda text: play(environment, [text]), unit)

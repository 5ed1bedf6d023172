"""Hostile texts, drawn at random, at every parser of calls and at every step of every environment that runs in this process.

No text may raise: a trajectory that an environment loses is left out of training, so that a policy would void what it does badly.
`JAXRL_LLM_FUZZ=5000 python -m pytest tests/hostile/test_fuzz_environments.py` draws so many texts for each case, instead of a few.
"""
import json
import os
import random
import re
import sys
import time
import warnings
from typing import Any

import pytest

from jaxrl_llm import environments, sandbox, tasks
from jaxrl_llm.environments import base, games, of_methods, openenv_server, parsers, purified, skill_chain, tools
from jaxrl_llm.environments.attacks import ATTACKS
from jaxrl_llm.environments.tool_use import of_tools

TEXTS = int(os.environ.get("JAXRL_LLM_FUZZ", "60"))
NUMBERS = ["7", "-1", "1.5", "5.0", "1e400", "-0.0", "NaN", "Infinity", "9" * 5000, "0x" + "f" * 5000, "1_0", "٣", "1/0", "2**9**9"]
DEEP = ["[" * 90 + "]" * 90, "[" * 3000 + "]" * 3000, '{"a":' * 95 + "1" + "}" * 95, "(" * 150 + ")" * 150, "-" * 1500 + "1"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "```python\n", "\n```\n", "```", "<memory>",
         "</memory>", "<answer>", "</answer>", r"\boxed{", "}", "{", "[", "]", "(", ")", ";", '"', "'", "\\", "\\\"", ",", ":", "="]
WORDS = ["north", "go north", "LEFT", "yes", "no", "take key", "[5]", "1. alibi", "Ω", "\0", "\ud800", "\x1b[31m", "\r", "\n", "\u2028",
         "\u202e", "def f(x):\n    return x\n", "sum(" + "+".join("1" * 400) + ")", "lambda:" * 200 + "0", "f(a)", "f" + "(a)" * 300]


def argument(chance: random.Random) -> str:
    """A value in JSON, or almost."""
    return chance.choice([*NUMBERS, *DEEP, "null", "true", json.dumps(chance.choice([*WORDS, *MARKS, *NUMBERS]) * chance.choice([1, 999])),
                          '"1' + "+1" * 200 + '"', '{"expression": "1"}', '"\\ud800"'])


def call(chance: random.Random) -> str:
    """A call in one of the formats, of a tool that may be there."""
    name, key = chance.choice(["calculator", "keep", "keep", "none", "\\u0000"]), chance.choice(["x", "expression", "y", "code"])
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
    return of_tools(tasks.make("arithmetic", chat=True), [tools.of_function(keep)], name="keep", parser=parser, reward=None, turns=8)


HERE = "test_fuzz_environments:"
CASES: list[tuple[str, dict]] = [
    ("single", {}), ("sequence", {"length": 5}), *((name, {"parser": parser}) for name in ("tool_use", HERE + "keeping", HERE + "notebook")
                                                   for parser in parsers.BY_NAME),
    ("memory_use", {}), ("recent", {}), ("recent", {"environment": "tool_use", "thoughts": False}), ("purified", {"retries": 9}),
    ("purified", {"environment": HERE + "notebook", "retries": 9}), ("solver_verifier", {}), ("ranked_list", {}), ("guess_number", {}),
    ("treasure", {}), ("tic_tac_toe", {}), ("gymnasium_text", {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}),
    ("textarena_game", {"game": "GuessTheNumber-v0"}), ("textarena_game", {"game": "TicTacToe-v0"})]


@pytest.mark.parametrize("name, options", CASES)
def test_no_text_voids_a_trajectory(name, options, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    package = {"gymnasium_text": "gymnasium", "textarena_game": "textarena"}.get(name)
    if package:
        pytest.importorskip(package)
    warnings.simplefilter("ignore")
    environment, chance = environments.make(name, **options), random.Random(f"{name} {options}")
    texts = [hostile(chance) for _ in range(TEXTS)]
    while texts:
        state, _ = base.begin(environment, environment.task.train[0], 0)
        turn = base.Turn()
        while texts and not turn.done:
            turn = base.advance(environment, state, {"role": "assistant", "content": texts.pop()})

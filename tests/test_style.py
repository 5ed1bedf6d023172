"""Limits that reviews would otherwise check: lengths of functions, suppressed warnings."""
import ast
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCREEN, LIMIT = 60, 100  # lines of a function: in the packages of the training loop, and anywhere
LOOP = ("training", "generation", "topologies", "recorders")


def lengths(text):
    """`(lines, name)` of each function; decorators do not count."""
    return [(node.end_lineno - node.lineno + 1, node.name) for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def suppressions(path):
    """The comments of a file that silence the linter."""
    with tokenize.open(path) as file:
        return [f"{path.relative_to(ROOT)}:{token.start[0]}" for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.COMMENT and "noqa" in token.string.lower()]


@pytest.mark.parametrize("folder, most", [*((f"jaxrl_llm/{package}", SCREEN) for package in LOOP), ("jaxrl_llm", LIMIT),
                                          ("experiments", LIMIT)])
def test_functions_fit_a_screen(folder, most):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 3
    long = [f"{path.relative_to(ROOT)}: {name} has {lines} lines" for path in files
            for lines, name in lengths(path.read_text(encoding="utf-8")) if lines > most]
    assert not long, long


def test_lengths_are_those_of_definitions():
    assert lengths("@f\ndef g():\n    def h():\n        pass\n    return (\n        h)\n") == [(5, "g"), (2, "h")]


def test_few_warnings_are_suppressed():
    places = [place for folder in ("jaxrl_llm", "experiments", "tests", "scripts", "configs")
              for path in sorted((ROOT / folder).rglob("*.py")) for place in suppressions(path)]
    assert 0 < len(places) < 10, places

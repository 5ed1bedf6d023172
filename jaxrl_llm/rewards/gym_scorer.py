"""The scorers of reasoning-gym. Imported by worker processes only: some of them evaluate what the policy wrote.

sympy's `parse_expr` runs any Python that a formula contains, and four scorers call `eval`. A program that runs here could
replace the scorer of all later completions. Both are therefore replaced before any answer is read: by a parser that first
checks every name of the formula, and by `ast.literal_eval`.
"""
import ast
import functools
import importlib
import json
import re
from typing import Any

import sympy
from sympy.parsing import sympy_parser

LITERALS = ("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens")
# `Integral` is not among them: the derivative of Integral(f, x) is f, so the question would be its own answer.
NAMES = frozenset("""sin cos tan exp log ln sqrt pi asin acos atan sinh cosh tanh Abs""".split())
_NO_FORMULA = re.compile(r"[\"'\[\]{}:;\\_]|[^\x00-\x7f]")  # Python reads some other letters as those of ASCII
_NUMBER_OR_NAME = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|([A-Za-z]\w*)")
_parse_expr = sympy_parser.parse_expr


def parse_formula(text: str, local_dict: dict[str, Any] | None = None, *arguments: Any, **options: Any) -> Any:
    """sympy's `parse_expr` of a formula whose names are single letters, keys of `local_dict` or `NAMES`; else ValueError."""
    allowed = NAMES | (local_dict or {}).keys()
    unknown = {name for name in _NUMBER_OR_NAME.findall(text) if len(name) > 1} - allowed
    if (unknown or _NO_FORMULA.search(text)) and not text.isidentifier():  # one name calls nothing; sympy's units are read so
        raise ValueError(f"{text[:200]!r} is not a formula: give numbers, operators, parentheses, single letters and the names "
                         f"{', '.join(sorted(allowed))}")
    return _parse_expr(text, local_dict, *arguments, **options)


sympy.parse_expr = sympy_parser.parse_expr = parse_formula  # the scorers import it by name, and `sympify` calls it
reasoning_gym = importlib.import_module("reasoning_gym")
for _name in LITERALS:
    setattr(importlib.import_module(f"reasoning_gym.{_name}"), "eval", ast.literal_eval)


@functools.cache
def _generator(dataset: str, config: str):
    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(config))


def score(given: str, entry: dict, dataset: str, config: str) -> float:
    """The data set's own `score_answer` of a stripped answer, in [0, 1]; `config` is JSON."""
    return float(_generator(dataset, config).score_answer(given, entry))

r"""Columns of a row as a problem: templates over columns, answers inside of longer texts, tests of programs.

`{question}` in a template is the column `question`, `{info.text}` a key of a column of objects; `{{` and `}}` are braces, and
so are `{` and `}` around anything that is not a name, as in `\boxed{}`.
"""
import json
import math
import re
import types
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.rewards import program_tests
from jaxrl_llm.rewards.math import last_boxed
from jaxrl_llm.tasks.base import Messages
from jaxrl_llm.tokenizers.messages import read, shown
from jaxrl_llm.tools.registry import nearest

_HOLE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.\-]*)\}")


def names_in(template: str) -> list[str]:
    """The columns, or paths, that a template names."""
    return [match[1] for match in _HOLE.finditer(template) if match[1]]


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with the values of the row; ValueError for a column that it lacks."""
    return _HOLE.sub(lambda match: match[0][0] if match[1] is None else text(at(row, match[1]), match[1]), template)


def at(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or at a path `column.key`; ValueError that names the existing columns or keys."""
    value: Any = row
    above = ""
    for name in [path] if path in row else path.split("."):
        if not isinstance(value, Mapping):
            raise ValueError(f"there is no column {path!r}: {above.removesuffix('.')!r} holds no keys, but {str(value)[:80]!r}")
        if name not in value:
            there = sorted(f"{above}{key}" for key in value)
            near = nearest(above + name, there, 1, cutoff=0.6)
            raise ValueError(f"there is no column {path!r}; there are {', '.join(there) or 'none'}"
                             + (f". Did you mean {near[0]!r}?" if near else ""))
        value, above = value[name], f"{above}{name}."
    return value


def text(value: Any, name: str) -> str:
    """A text or a number as text; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"column {name!r} holds a {type(value).__name__}, {str(value)[:80]!r}; give texts or numbers")
    return str(value)


def is_blank(given: str) -> bool:
    """Whether the text is invisible: only spaces, control and format characters."""
    return all(unicodedata.category(c)[0] in "ZC" for c in given)


def messages(value: Any, name: str) -> Messages:
    """Chat messages with a `role` and a `content`, a text or parts of one; a call needs no content. ValueError for others."""
    wrong = "" if isinstance(value, list) and value else f", got {shown(value)}"
    for number, message in enumerate(value if not wrong else ()):
        wrong = wrong or _malformed(message, f"{name}[{number}]")
    if wrong:
        raise ValueError(f"{name!r} must be a non-empty list of objects with the strings 'role' and 'content'{wrong}")
    return tuple(read(message, f"{name}[{i}]") for i, message in enumerate(value))


def _malformed(message: Any, where: str) -> str:
    """What is wrong with a message; empty if nothing is."""
    if not isinstance(message, dict):
        return f"; {where} is {shown(message)}"
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        return f"; {where}.role is {shown(role)}" if "role" in message else f"; {where} has no 'role'"
    if content is None:
        return "" if message.get("tool_calls") else f"; {where} has no 'content'"
    return "" if isinstance(content, str | list) else f"; {where}.content is {shown(content)}"


def answer(value: Any, name: str) -> str:
    """The text of the answer, as it is written: of a text, a number, a truth value or a list, the last two as JSON.

    Raises ValueError if there is none, or if an empty completion would match it.
    """
    if value is None or isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!r} must be an answer, got {value}; give a text, a number, true, false or a list")
    if isinstance(value, str) and is_blank(value):
        raise ValueError(f"{name!r} must be a string with something to see in it, got {value!r}: an empty completion would be "
                         "right")
    if not isinstance(value, str | int | float | list):
        raise ValueError(f"{name!r} must be a text, a number, true, false or a list, got a {type(value).__name__}, "
                         f"{str(value)[:80]!r}; name a key of it, for example answer='{name}.ground_truth'")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list) else str(value)


# --- answers inside of texts --------------------------------------------------------------------------------------------


def extractor(how: str) -> Callable[[str], str | None]:
    r"""A function that finds the answer in a text, or returns None.

    "" takes the text itself, "gsm8k" the text after the last `####`, "boxed" the content of the last `\boxed{}`; anything else
    is a regular expression with one group, whose last match counts. Raises ValueError: for anything else.
    """
    if how in _EXTRACT:
        return _EXTRACT[how]
    import re2

    try:
        pattern = re2.compile(how)
    except re2.error as error:
        raise ValueError(f"extract={how!r} is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise ValueError(f"extract={how!r}; give {', '.join(filter(None, _EXTRACT))}, or a regular expression with one group "
                         r"in brackets around the answer, for example '#### *(.+)'")

    def find(given: str) -> str | None:
        matches = [match[1] for match in pattern.finditer(given)]
        return matches[-1] if matches else None

    return find


def _behind_hashes(given: str) -> str | None:
    _, mark, rest = given.rpartition("####")
    return rest.strip() if mark else None


_EXTRACT: dict[str, Callable[[str], str | None]] = {"": lambda given: given, "gsm8k": _behind_hashes, "boxed": last_boxed}


# --- tests of programs --------------------------------------------------------------------------------------------------


def tests(value: Any, name: str, row: Mapping[str, Any] = types.MappingProxyType({})) -> list[dict[str, Any]]:
    """Tests as the reward `code` reads them, see `rewards.program_tests`.

    `value`: such a list of objects or of assert statements; or one object of lists, `input` and `output` (or `inputs` and
    `outputs`), with `fn_name` where they are arguments and results; or either as JSON; or assert statements as one text. Inputs
    and outputs are texts, numbers or lists of lines. With `fn_name` a list of one result also stands for its one value. The
    `row` has `metadata` or `entry_point`, which name a function. Raises ValueError: for anything else, and if there is no test,
    or none that fails for a program without output.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            if "assert" not in value:
                raise ValueError(f"column {name!r} is no JSON: {error}") from error
    try:
        made = _of_lists(value) if isinstance(value, dict) else value
        return program_tests.read([_with_streams(test, row) for test in made] if isinstance(made, list) else made, row)
    except ValueError as error:
        raise ValueError(f"column {name!r}, {str(value)[:80]!r}: {error}. It may also be an object of two lists, inputs and "
                         "outputs; outputs are texts, numbers or lists of lines, and not all of them are blank") from error


def _of_lists(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One test for each input and output, with all other keys."""
    inputs, outputs = (value.get(key, value.get(key + "s")) for key in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"two lists of equal length are needed, input and output, got keys {sorted(value)}")
    others = {key: part for key, part in value.items() if key.removesuffix("s") not in ("input", "output") and part is not None}
    return [{**others, "input": given, "output": expected} for given, expected in zip(inputs, outputs)]


def _with_streams(test: Any, row: Mapping[str, Any]) -> Any:
    """The test with its input and output as texts, where they can be; those of functions are left as they are."""
    if not isinstance(test, dict) or test.get("function") or program_tests.is_call(test, row):
        return test
    return {**test, **{key: _stream(test[key]) for key in ("input", "output") if key in test}}


def _stream(value: Any) -> Any:
    """A number as text, a list of lines as lines; anything else as it is."""
    if isinstance(value, list) and all(isinstance(line, str | int | float) and not isinstance(line, bool) for line in value):
        return "\n".join(map(str, value))
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

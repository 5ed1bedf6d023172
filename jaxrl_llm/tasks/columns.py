r"""Columns of a row as a problem: templates over columns, answers inside of longer texts, tests of programs.

`{question}` in a template is the column `question`, `{info.text}` a key of a column of objects; `{{` and `}}` are braces, and
so are `{` and `}` around anything that is not a name, as in `\boxed{}`.
"""
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.registry import nearest
from jaxrl_llm.rewards.code import well_formed
from jaxrl_llm.rewards.math import last_boxed
from jaxrl_llm.tasks.base import Messages
from jaxrl_llm.tokenizers.messages import read

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
    for name in [path] if path in row else path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            there = sorted(map(str, value)) if isinstance(value, Mapping) else []
            near = nearest(name, there, 1, cutoff=0.6)
            raise ValueError(f"there is no column {path!r}; there are {', '.join(there) or 'none'}"
                             + (f". Did you mean {near[0]!r}?" if near else ""))
        value = value[name]
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
    def well_formed(message: Any) -> bool:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        content = message.get("content")
        return bool(message.get("tool_calls")) if content is None else isinstance(content, str | list)

    if not isinstance(value, list) or not value or not all(map(well_formed, value)):
        raise ValueError(f"{name!r} must be a non-empty list of objects with the strings 'role' and 'content'")
    return tuple(read(message, f"{name}[{i}]") for i, message in enumerate(value))


def answer(value: Any, name: str) -> str:
    """The text that holds the answer; ValueError if an empty completion would match it, or if it is no text or integer."""
    if isinstance(value, bool) or not isinstance(value, str | int) or is_blank(str(value)):
        raise ValueError(f"{name!r} must be a string with something to see in it or an integer, got {value!r}: an empty "
                         "completion would be right")
    return str(value)


# --- answers inside of texts --------------------------------------------------------------------------------------------


def extractor(how: str) -> Callable[[str], str | None]:
    r"""A function that finds the answer in a text, or returns None.

    "" takes the text itself, "gsm8k" the text after the last `####`, "boxed" the content of the last `\boxed{}`; anything else
    is a regular expression with one group, whose last match counts.

    Raises:
      ValueError: for anything else.
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


def tests(value: Any, name: str) -> list[dict[str, Any]]:
    """Tests as the reward `code` reads them.

    `value`: such a list of objects (`input` and `output`, or `function`, `args` and `result`); or one object of lists, `input`
    and `output` (or `inputs` and `outputs`), with `fn_name` where they are arguments and results; or either as JSON. Inputs and
    outputs are texts, numbers or lists of lines. With `fn_name` a list of one result also stands for its one value.

    Raises:
      ValueError: for anything else, and if there is no test, or none that fails for a program without output.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {name!r} is no JSON: {error}") from error
    if isinstance(value, dict):
        value = _of_lists(value, name)
    made = [_with_streams(test) for test in value] if isinstance(value, list) else []
    if not well_formed(made):
        raise ValueError(f"column {name!r} holds no tests, {str(value)[:80]!r}; give a list of objects with input and output, "
                         "or with function, args and result, or an object of two lists, inputs and outputs. Outputs are texts, "
                         "numbers or lists of lines, and not all of them are blank")
    return made


def _of_lists(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    inputs, outputs = (value.get(key, value.get(key + "s")) for key in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"column {name!r} needs two lists of equal length, input and output, got keys {sorted(value)}")
    function = value.get("fn_name")
    if function:
        return [{"function": function, "args": args, "result": result}
                | ({"wrapped": True} if isinstance(result, list) and len(result) == 1 else {})
                for args, result in zip(inputs, outputs)]
    return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs)]


def _with_streams(test: Any) -> Any:
    """The test with its input and output as texts, where they can be."""
    if not isinstance(test, dict) or test.get("function"):
        return test
    return {**test, **{key: _stream(test[key]) for key in ("input", "output") if key in test}}


def _stream(value: Any) -> Any:
    """A number as text, a list of lines as lines; anything else as it is."""
    if isinstance(value, list) and all(isinstance(line, str | int | float) and not isinstance(line, bool) for line in value):
        return "\n".join(map(str, value))
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

"""Parts and options that are written as text: `name(option=value, ...), ...`."""
import ast
import re
from typing import Any


def keywords(text: str) -> dict[str, Any]:
    """`"a=1, b='x'"` as a dict of Python literals; bare words, paths and calls `name(...)` are strings.

    Raises ValueError: when a part is not `name=value`, or a name is given twice.
    """
    given = {}
    for part in parts(text):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            literal = value
        if not name.isidentifier() or name in given or (literal is value and not re.fullmatch(r"[\w.+:/~-]+|\w+\(.*\)", value)):
            raise ValueError(f"cannot read {part!r} in {text!r}; write options as name=value, name=value, each name once, "
                             "and text with spaces or signs in quotes")
        given[name] = literal
    return given


def calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`"exact, format(pattern='a*', weight=0.1)"` as names with their `keywords`; ValueError when it reads otherwise."""
    named = []
    for part in parts(text):
        call = re.fullmatch(r"([\w.:]+)\s*(?:\((.*)\))?", part, re.DOTALL)
        if call is None:
            raise ValueError(f"cannot read {part!r} in {text!r}; write name, or name(option=value, option=value)")
        named.append((call[1], keywords(call[2] or "")))
    return named


def parts(text: str) -> list[str]:
    """The parts between commas outside quotes and brackets, without empty ones."""
    stretches, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not quote and not depth:
            stretches.append("")
        else:
            stretches[-1] += character
    return [part.strip() for part in stretches if part.strip()]

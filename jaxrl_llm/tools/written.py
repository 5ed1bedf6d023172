"""Parts and options that are written as text: `name(value, option=value, ...)`, in lists `a, b(...)` and sums `a + b(...)`."""
import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def keywords(text: str, order: Callable[[], Sequence[str]] = tuple) -> dict[str, Any]:
    """`"a=1, b='x'"` as a dict of Python literals and `inf`; other bare words, paths and calls `name(...)` are strings.

    Values without a name come first and take the names of `order()`, which is called only for them.
    Raises ValueError: when a part cannot be read, a name is repeated, or there are more values without a name than names.
    """
    values: list[Any] = []
    named: dict[str, Any] = {}
    for part in parts(text):
        match = re.fullmatch(r"([^\W\d]\w*)\s*=\s*(.*)", part, re.DOTALL)
        name, value = match.groups() if match else ("", part)
        try:
            read = literal(value)
        except ValueError:
            raise _unreadable(part, text) from None
        if name in named or (not name and (named or order is tuple)):
            raise _unreadable(part, text)
        if name:
            named[name] = read
        else:
            values.append(read)
    return {**_positional(text, values, tuple(order()) if values else (), named), **named}


def _unreadable(part: str, text: str) -> ValueError:
    return ValueError(f"cannot read {part!r} in {text!r}; write options as name=value, name=value, each name once, and text "
                      "with spaces or signs in quotes")


def literal(text: str) -> Any:
    """A value of Python, or `inf`; other bare words, paths and calls `name(...)` are strings. ValueError for any other text."""
    try:
        return float(text) if text in ("inf", "-inf") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[\w.+:/~-]+|\w+\(.*\)", text, re.DOTALL):
            return text
        raise ValueError(f"cannot read {text!r}; write text with spaces or signs in quotes") from None


def unquoted(text: str) -> str:
    """A text such as `clip_high=0.3 + kl(0.1)` as it is, or without the quotes around it; ValueError if these do not close."""
    return str(literal(text)) if text[:1] in ("'", '"') else text


def _positional(text: str, values: Sequence[Any], names: Sequence[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """The values without a name, by their names."""
    if len(values) > len(names):
        raise ValueError(f"{text!r} has more values without a name than the part has numbers: {', '.join(names) or 'none'}")
    if twice := {*names[:len(values)]} & {*named}:
        raise ValueError(f"{text!r} sets {', '.join(sorted(twice))} twice: by its place and by its name; leave one of them out")
    return dict(zip(names, values, strict=False))


def calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`"exact, format(pattern='a*', weight=0.1)"` as names with their `keywords`; ValueError when it reads otherwise."""
    return [call(part) for part in parts(text)]


def call(text: str, order: Callable[[str], Sequence[str]] | None = None) -> tuple[str, dict[str, Any]]:
    """`"format(pattern='a*', weight=0.1)"` as a name with its `keywords`; ValueError when it reads otherwise.

    `order(name)`: names of the numbers of a part, for values without a name; None: every value has its name.
    """
    match = re.fullmatch(r"([\w.:]+)\s*(?:\((.*)\))?", text, re.DOTALL)
    if match is None or not closed(match[2] or ""):
        raise ValueError(f"cannot read {text!r}; write name, or name(option=value, option=value)")
    return match[1], keywords(match[2] or "", tuple if order is None else functools.partial(order, match[1]))


def written(name: str, numbers: Mapping[str, Any]) -> str:
    """The text that `calls` reads as this name and these numbers."""
    inner = ", ".join(f"{key}={_value(value)}" for key, value in numbers.items())
    return f"{name}({inner})" if inner else name


def _value(value: Any) -> str:
    """A value that `keywords` reads as itself."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.+:/~-]+|\w+\(.*\)", value, re.DOTALL) or not closed(value):
        return repr(value)
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return repr(value)


def parts(text: str, sign: str = ",") -> list[str]:
    """The parts between commas, or another `sign`, outside quotes, brackets and numbers such as 1e+2, without empty ones."""
    stretches = [""]
    for character, depth in _marked(text):
        if character == sign and not depth and not re.search(r"\d[eE]$", stretches[-1]):
            stretches.append("")
        else:
            stretches[-1] += character
    return [part.strip() for part in stretches if part.strip()]


def closed(text: str) -> bool:
    """Whether brackets and quotes of a text open before they close, and all of them close."""
    depths = [0, *(depth for _, depth in _marked(text))]
    return min(depths) >= 0 and depths[-1] == 0


def _marked(text: str) -> list[tuple[str, int]]:
    """The characters of a text, each with the number of open brackets after it, to which an open quote adds one."""
    marked, depth, quote = [], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        marked.append((character, depth + bool(quote)))
    return marked

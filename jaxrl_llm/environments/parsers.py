"""Parsers of tool calls in a policy's text, in the formats that models were trained on, and writers of single calls.

Parsing takes time linear in the text. A parser is `parse(text) -> calls`; an empty list means that the text is an answer. A
malformed call is returned with its `error`, so that the policy can read it. Calls inside thoughts (before the last
`</think>`, or in a thought that is not closed) do not count.
"""
import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxrl_llm import registry
from jaxrl_llm.environments.tools import Call
from jaxrl_llm.rewards.programs import python_block

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_PYTHONIC = re.compile(r"\[?\s*[A-Za-z_]\w*\(")
_BRACKETS = re.compile(r"""\\.|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[()]""", re.DOTALL)  # and what is in quotes or escaped
LENGTH_LIMIT = 10_000  # characters of a Python call; later ones are not read


def hermes(text: str) -> list[Call]:
    """Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    text, calls, position = _answer(text), [], 0
    while (start := text.find(_OPEN, position)) >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            return [*calls, Call("", {}, f"{_OPEN} is not closed by {_CLOSE}")]
        calls.append(_call(text[start + len(_OPEN):end], "arguments"))
        position = end + len(_CLOSE)
    return calls


def llama3(text: str) -> list[Call]:
    """Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, or several, separated by semicolons."""
    text, calls = _answer(text).strip().removeprefix("<|python_tag|>").strip(), []
    while text.startswith("{"):
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return [*calls, Call("", {}, "the call is not valid JSON")] if '"name"' in text else calls
        if not calls and "name" not in value:
            return []  # an answer in JSON
        calls.append(_call(text[:end], "parameters"))
        text = text[end:].strip()
        if text and not text.startswith(";"):
            return []  # an answer that begins with an object
        text = text[1:].strip()
    return calls


def pythonic(text: str) -> list[Call]:
    """Llama 3.2 and 4: the whole text is a list of Python calls, `[name(key="value"), ...]`, or one call without brackets.

    A text that goes on after a call without brackets is an answer, such as `f(2) = 7`.
    """
    text = _answer(text).strip().removeprefix("<|python_tag|>").strip()
    if not _PYTHONIC.match(text):
        return []
    listed = text.startswith("[")
    try:
        tree = ast.parse(text[:LENGTH_LIMIT], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [] if not listed and _goes_on(text) else [Call("", {}, "the call is no Python expression")]
    if not listed and not isinstance(tree, ast.Call):
        return []
    return [_python_call(one) for one in (tree.elts if isinstance(tree, ast.List) else [tree])]


def fenced(text: str) -> list[Call]:
    """The last ```python block, as a call of the tool `python`."""
    program = python_block(_answer(text))
    return [] if program is None else [Call("python", {"code": program})]


PARSERS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes, "llama3": llama3, "pythonic": pythonic,
                                                      "fenced": fenced}


BY_NAME = sorted(PARSERS.keys() - {"fenced"})  # those that read names of tools, which programs in fences do not have


def named_parser(name: str, allowed: Collection[str] = tuple(PARSERS)) -> Callable[[str], list[Call]]:
    """The parser of that name, one of `allowed`, or your own "module:function". Raises ValueError if there is none."""
    kind = "parser of calls"
    return registry.function_of(kind, name) if ":" in name else PARSERS[registry.one_of(kind, name, allowed)]


def _json(name: str, key: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, key: dict(arguments)})


def _literal(value: Any) -> str:
    """A value in Python, texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


WRITERS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {  # a call that the parser of the same name reads
    "hermes": lambda name, arguments: f"{_OPEN}{_json(name, 'arguments', arguments)}{_CLOSE}",
    "llama3": lambda name, arguments: _json(name, "parameters", arguments),
    "pythonic": lambda name, arguments: f"[{name}({', '.join(f'{key}={_literal(x)}' for key, x in arguments.items())})]",
    "fenced": lambda name, arguments: f"```python\n{arguments.get('code', '')}\n```",  # always of the tool `python`
}


def _answer(text: str) -> str:
    """The text after the thoughts, "" if the last one is not closed."""
    rest = text.rpartition("</think>")[2]
    return "" if rest.lstrip().startswith("<think>") else rest  # further on it may be the argument of a call


def _call(text: str, key: str) -> Call:
    """One call from its JSON; arguments by `key`, or by the key of the other format."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not valid JSON ({str(error)[:100]})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", {}, 'a call is an object with a "name"')
    arguments = call.get(key, call.get("arguments", call.get("parameters", {})))
    if not isinstance(arguments, dict):
        return Call(call["name"], {}, f'"{key}" of a call is an object')
    return Call(call["name"], arguments)


def _goes_on(text: str) -> bool:
    """Whether a text that begins with a call goes on after its last bracket; brackets in texts in quotes do not count."""
    depth = 0
    for piece in _BRACKETS.finditer(text, 0, LENGTH_LIMIT):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if piece[0] == ")" and depth == 0:
            return bool(text[piece.end():].strip())
    return False


def _python_call(node: ast.expr) -> Call:
    """One call with keywords whose values are literals. Nothing is evaluated."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Call("", {}, 'a call is written name(key="value")')
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Call(node.func.id, {}, 'arguments are given by name, name(key="value")')
    try:
        literals = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return Call(node.func.id, json.loads(json.dumps(literals)))  # sets, bytes and the like are no arguments
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Call(node.func.id, {}, "arguments of a call are literals, such as numbers and texts in quotes")

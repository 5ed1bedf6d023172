"""Parsers of tool calls in a policy's text, in the formats that models were trained on, and writers of single calls.

Parsing takes time linear in the text. A parser is `parse(text) -> calls`; an empty list means that the text is an answer. A
malformed call is returned with its `error`, so that the policy can read it. Calls inside thoughts (before the last
`</think>`, or in a thought that is not closed) do not count. A mark that a call quotes is a part of its argument.
"""
import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxrl_llm.environments.tools import Call
from jaxrl_llm.rewards.programs import last_opening, python_block
from jaxrl_llm.tasks.jsonl import MAX_DEPTH, depth
from jaxrl_llm.tools import registry

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END, _TAG = "</think>", "<|python_tag|>"
_DECODER = json.JSONDecoder()
_OPENS_OR_ENDS, _SPACE = re.compile(f"{OPEN}|{_END}"), re.compile(r"\s*")
# What is in quotes does not count. Repetitions are possessive, and a backslash or an end of a thought outside of quotes ends a
# match: of the matches that begin at several marks of a text, at most two pass any place, so that all of them take linear time.
_TEXT = r'"(?:[^"\\]++|\\.)*+"'
_BODY = re.compile(rf'((?:[^"\\<]++|<(?!/?tool_call>|/think>)|{_TEXT})*+){CLOSE}', re.DOTALL)
_WHOLE = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(?:\{|\[?\s*[A-Za-z_]\w*\()"
                    rf"""(?:[^"'\\<]++|<(?!/think>)|{_TEXT}|'(?:[^'\\]++|\\.)*+')*+\Z""", re.DOTALL)
_PYTHONIC = re.compile(r"\[?\s*[A-Za-z_]\w*\(")
_BRACKETS = re.compile(r"""\\.|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[()]""", re.DOTALL)  # and what is in quotes or escaped
LENGTH_LIMIT = 10_000  # characters of a Python call; later ones are not read


def hermes(text: str) -> list[Call]:
    """Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    text, calls, position = _answer(text), [], 0
    while (start := text.find(OPEN, position)) >= 0:
        start += len(OPEN)
        body = _BODY.match(text, start)
        call = Call("", {}) if body is None else _call(body[1], "arguments")
        position = start if body is None else body.end()
        if not call.name:  # what it quotes is unknown
            end = text.find(CLOSE, start)
            if end < 0:
                return [*calls, Call("", {}, f"{OPEN} is not closed by {CLOSE}")]
            call, position = _call(text[start:end], "arguments"), end + len(CLOSE)
        calls.append(call)
    return calls


def llama3(text: str) -> list[Call]:
    """Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, or several, separated by semicolons."""
    return _objects(_untagged(_answer(text)))


def pythonic(text: str) -> list[Call]:
    """Llama 3.2 and 4: the whole text is a list of Python calls, `[name(key="value"), ...]`, or one call without brackets.

    A text that goes on after a call without brackets is an answer, such as `f(2) = 7`.
    """
    return _python(_untagged(_answer(text)))


def fenced(text: str) -> list[Call]:
    """The last ```python block, as a call of the tool `python`."""
    program = python_block(_answer(text))
    return [] if program is None else [Call("python", {"code": program})]


PARSERS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes, "llama3": llama3, "pythonic": pythonic, "fenced": fenced}


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
    "hermes": lambda name, arguments: f"{OPEN}{_json(name, 'arguments', arguments)}{CLOSE}",
    "llama3": lambda name, arguments: _json(name, "parameters", arguments),
    "pythonic": lambda name, arguments: f"[{name}({', '.join(f'{key}={_literal(x)}' for key, x in arguments.items())})]",
    "fenced": lambda name, arguments: f"```python\n{arguments.get('code', '')}\n```",  # always of the tool `python`
}


def without_thoughts(text: str) -> str:
    """The text after its last `</think>`, or the text without one. A `</think>` that a call quotes does not count."""
    starts = [0, *_ends(text)]
    if len(starts) == 1:
        return text
    start = next((start for start in starts[:-1] if _is_call(text, start)), None)
    return text[_before_program(text, starts) if start is None else start:]


def _answer(text: str) -> str:
    """The text after the thoughts, "" if the last one is not closed."""
    rest = without_thoughts(text)
    return "" if rest.lstrip().startswith("<think>") else rest  # further on it may be the argument of a call


def _ends(text: str) -> list[int]:
    """The places after each `</think>` that no call in `<tool_call>` quotes."""
    ends, position = [], 0
    while mark := _OPENS_OR_ENDS.search(text, position):
        position = mark.end()
        if mark[0] == _END:
            ends.append(position)
        elif (body := _BODY.match(text, position)) and _END in body[1] and _call(body[1], "arguments").name:
            position = body.end()
    return ends


def _is_call(text: str, start: int) -> bool:
    """Whether the text from there on is a call, as `llama3` or `pythonic` read it."""
    if not _WHOLE.match(text, start):
        return False
    rest = _untagged(text[start:])
    calls = _objects(rest) or _python(rest)
    return bool(calls) and not any(call.error for call in calls)


def _before_program(text: str, starts: list[int]) -> int:
    """The last of the `starts`, or the last one before a program in a fence that quotes the end of a thought there."""
    begin = last_opening(text, starts[-1])
    program = None if begin < 0 else python_block(text[begin:])
    if program is None or _END not in program or text.find(program, begin) + len(program) < starts[-1]:
        return starts[-1]
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a fence that a thought left open
        return starts[-1]
    return max(start for start in starts if start <= begin)


def _untagged(text: str) -> str:
    return text.strip().removeprefix(_TAG).strip()


def _objects(text: str) -> list[Call]:
    """The calls of a text that is JSON objects with semicolons between them."""
    calls, position = list[Call](), 0
    while text.startswith("{", position):
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return [*calls, Call("", {}, "the call is not valid JSON")] if text.find('"name"', position) >= 0 else calls
        if not calls and "name" not in value:
            return []  # an answer in JSON
        calls.append(_of_value(value, "parameters"))
        position = _SPACE.match(text, position).end()
        if position < len(text) and text[position] != ";":
            return []  # an answer that begins with an object
        position = _SPACE.match(text, position + 1).end()
    return calls


def _python(text: str) -> list[Call]:
    """The calls of a text that is an expression in Python."""
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


def _call(text: str, key: str) -> Call:
    """One call from its JSON."""
    try:
        return _of_value(json.loads(text), key)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not valid JSON ({str(error)[:100]})")


def _of_value(call: Any, key: str) -> Call:
    """One call; arguments by `key`, or by the key of the other format, as an object or as its JSON. None and "" are none."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", {}, 'a call is an object with a "name"')
    arguments = next((call[name] for name in (key, "arguments", "parameters") if call.get(name) is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            pass  # no object
    if not isinstance(arguments, dict):
        return Call(call["name"], {}, f'"{key}" of a call is an object')
    return _bounded(Call(call["name"], arguments))


def _bounded(call: Call) -> Call:
    """The call, without its arguments if they are nested so deeply that tools and copies, which recurse, fail on them."""
    if depth(call.arguments) <= MAX_DEPTH:
        return call
    return Call(call.name, {}, f"the arguments are nested deeper than {MAX_DEPTH} levels")


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
        return _bounded(Call(node.func.id, json.loads(json.dumps(literals))))  # sets, bytes and the like are no arguments
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Call(node.func.id, {}, "arguments of a call are literals, such as numbers and texts in quotes")

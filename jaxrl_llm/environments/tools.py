"""Functions that a policy may call: their schema for the chat template, checks of arguments, and results as text."""
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import registry

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}
_CHECKS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
                                        "array": (list,), "object": (dict,), "null": (type(None),)}
CALLS = 4  # calls of a message: without a limit they could exceed the deadline of a step
_TOO_MANY = f"error: a message has at most {CALLS} calls"
RESULT_LIMIT = 8000  # characters of a result, so that a tool's output cannot fill the context


class ToolError(ValueError):
    """A call that cannot be answered; the policy reads why. Other exceptions of a tool are faults of the tool."""


class Call(NamedTuple):
    """A call that the policy made; `error` is the reason why it is invalid."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function by name: `call(**arguments) -> str`; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., str]

    @property
    def schema(self) -> dict:
        """The schema in the form that chat templates take."""
        return {"type": "function", "function": {"name": self.name, "description": self.description,
                                                 "parameters": dict(self.parameters)}}


def of_function(function: Callable[..., Any]) -> Tool:
    """The tool of a function with typed arguments and a docstring whose `Args:` describe them (Google's style).

    Raises ValueError for arguments without a type, of a type that JSON lacks, or positional-only.
    """
    text = inspect.getdoc(function) or ""
    listed = text.partition("Args:")[2].partition("Returns:")[0]
    described = dict(re.findall(r"^ {2,8}(\w+)[^:\n]*: *(.+)$", listed, re.MULTILINE))
    hints, properties, required = typing.get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"argument {name!r} of tool {function.__name__!r} has no type, or is not given by name; write "
                             f"`def {function.__name__}({name}: str) -> str`")
        properties[name] = {**_schema_of(hints[name], f"{function.__name__}({name})"), "description": described.get(name, "")}
        if parameter.default is parameter.empty:
            required.append(name)
    summary = re.split(r"\n\s*\n|Args:", text)[0].strip()
    return Tool(function.__name__, summary, {"type": "object", "properties": properties, "required": required}, function)


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {**_schema_of(type(arguments[0]), where), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema_of(kind, where)["type"] for kind in arguments]
        return {"type": kinds if len(kinds) > 1 else kinds[0]}
    if origin is list and arguments:
        return {"type": "array", "items": _schema_of(arguments[0], where)}
    if (origin or hint) not in _TYPES:
        raise ValueError(f"{where} has the type {hint}; allowed are {', '.join(kind.__name__ for kind in _TYPES)}, lists of "
                         "them, Literal and unions")
    return {"type": _TYPES[origin or hint]}


def run(tools: Sequence[Tool], call: Call) -> str:
    """The text that the policy reads after a call: the result, or "error: ..." with the reason."""
    try:
        if call.error:
            raise ToolError(call.error)
        by_name = {tool.name: tool for tool in tools}
        tool = by_name[registry.one_of("tool", call.name, by_name)]
        check(tool, call.arguments)
    except ValueError as error:
        return f"error: {error}"
    try:
        result = tool.call(**call.arguments)
    except ToolError as error:
        return f"error: {error}"
    return shorten(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))


def answers(tools: Sequence[Tool], calls: Sequence[Call], role: str = "tool") -> list[dict[str, str]]:
    """The answer to each call of a message. At most `CALLS` calls are made; the others are answered by an error."""
    results = [run(tools, call) for call in calls[:CALLS]] + [_TOO_MANY] * (len(calls) - CALLS)
    return [{"role": role, "name": call.name, "content": result} for call, result in zip(calls, results)]


def identity(calls: Sequence[Call]) -> str | None:
    """A text that is equal for equal calls, however they were written; None for arguments that are nested too deeply.

    The order of arguments, spaces around texts, and the form of whole numbers do not count.
    """
    try:
        made = [[call.name, _plain(dict(call.arguments)), call.error] for call in calls[:CALLS]]
        return json.dumps([*made, len(calls)], sort_keys=True)
    except RecursionError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return value.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Raises ToolError if arguments are missing, unknown or not of the schema's type.

    Only `type` and `enum` of a schema are checked.
    """
    properties = tool.parameters.get("properties", {})
    for name in arguments:
        registry.one_of(f"argument of {tool.name}", name, properties)
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise ToolError(f"{tool.name} needs the argument {missing[0]!r}")
    for name, value in arguments.items():
        kinds, allowed = properties[name].get("type", list(_CHECKS)), properties[name].get("enum")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        fits = any(isinstance(value, _CHECKS[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds)
        if not fits or (allowed is not None and value not in allowed):
            wanted = f"one of {allowed}" if allowed is not None else " or ".join(kinds)
            raise ToolError(f"argument {name!r} of {tool.name} is {json.dumps(value)[:100]}; allowed is {wanted}")


def shorten(text: str) -> str:
    """The text, with the middle of a long one cut."""
    half = RESULT_LIMIT // 2
    return text if len(text) <= RESULT_LIMIT else f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"

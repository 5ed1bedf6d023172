"""Functions that a policy may call: their schema for the chat template, checks of arguments, and results as text."""
import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.pool import cores
from jaxrl_llm.tools import registry

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}  # can be values of an enum
_TYPES = _SCALARS | {list: "array", tuple: "array", dict: "object"}
_CHECKS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
                                        "array": (list,), "object": (dict,), "null": (type(None),)}
CALLS = 4  # calls of a message: without a limit they could exceed the deadline of a step
_SECTION = re.compile(r"(?:\n|^)\s*(?:Args|Returns|Raises):")  # of a docstring
_ARGUMENTS, _HEADING = re.compile(r"^([ \t]*)Args:[ \t]*\n", re.MULTILINE), re.compile(r"[A-Z]\w+:")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
NAME_LIMIT = 64  # characters of a name in an answer, since the name of an unknown tool is the policy's own text
RESULT_LIMIT = 8000  # characters of a result, so that a tool's output cannot fill the context


class ToolError(ValueError):
    """A call that cannot be answered; the policy reads why. Other exceptions of a tool are faults of the tool."""


class Result(NamedTuple):
    """The text that the policy reads after a call, and whether the call failed."""

    text: str
    failed: bool = False


class Call(NamedTuple):
    """A call that the policy made; `error` is the reason why it is invalid."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function by name; `parameters` is a JSON schema of type object, which allows any arguments if it has no `properties`.

    `call(**arguments)` returns a text, or a `Result` if failures have an output of their own. `program`: a call runs a program,
    which takes a while and needs a core.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., str | Result]
    program: bool = False

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
    hints, properties, required = typing.get_type_hints(function), {}, []
    parameters = inspect.signature(function).parameters
    described = _described(text, parameters)
    for name, parameter in parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"argument {name!r} of tool {function.__name__!r} has no type, or is not given by name; write "
                             f"`def {function.__name__}({name}: str) -> str`")
        schema = _schema_of(hints[name], f"{function.__name__}({name})")
        properties[name] = _with_choices({**schema, "description": described.get(name, "")})
        if parameter.default is parameter.empty:
            required.append(name)
    summary = _SECTION.split(text)[0].strip()
    return Tool(function.__name__, summary, {"type": "object", "properties": properties, "required": required}, function)


def _described(text: str, names: Collection[str]) -> dict[str, str]:
    """The descriptions of these arguments in the `Args:` of a docstring, the lines of each joined by spaces."""
    found, name, depth, blank = dict[str, list[str]](), "", None, False
    begin = _ARGUMENTS.search(text)
    for line in text[begin.end():].split("\n") if begin else ():
        said, indent = line.strip(), len(line) - len(line.lstrip())
        if said and indent <= len(begin[1]) and (blank or _HEADING.fullmatch(said)):
            break
        blank = not said
        depth = indent if depth is None else depth
        begun = _ARGUMENT.fullmatch(said) if indent <= depth else None
        if begun is not None and begun[1] in names:
            name, said = begun.groups()
        found.setdefault(name, []).append(said)
    return {name: " ".join(filter(None, said)) for name, said in found.items()}


def _with_choices(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the values that its description lists at its end, `(choices: ["a", "b"])`, as transformers reads them."""
    listed = _CHOICES.search(schema["description"])
    try:
        values = json.loads(listed[1]) if listed else None
    except ValueError:
        values = None
    if listed is None or not isinstance(values, list):
        return schema
    values = [value.strip() if isinstance(value, str) else value for value in values]
    null = [None] if "null" in _kinds(schema) and "type" in schema and None not in values else []
    return {**schema, "enum": values + null, "description": schema["description"][:listed.start()].strip()}


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return _one_of(arguments, hint, where)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _one_of([member.value for member in hint], hint, where)
    if origin in (typing.Union, types.UnionType):
        return _any_of([_schema_of(kind, where) for kind in arguments])
    if (origin or hint) not in _TYPES:
        raise _not_of_json(hint, where)
    schema: dict[str, Any] = {"type": _TYPES[origin or hint]}
    if origin is list and arguments or arguments[1:] == (...,):
        schema["items"] = _schema_of(arguments[0], where)
    elif origin is tuple and arguments:
        schema["prefixItems"] = [_schema_of(kind, where) for kind in arguments]
    elif origin is dict and arguments:
        schema["additionalProperties"] = _schema_of(arguments[1], where)
    return schema


def _one_of(values: Sequence[Any], hint: Any, where: str) -> dict[str, Any]:
    """The schema of values that are listed."""
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _not_of_json(hint, where)
    return {"type": _joined([_SCALARS[type(value)] for value in values]), "enum": list(values)}


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schema of a union: a list of types, if they say no more. Null joins the types and values of a single other one."""
    others = [schema for schema in schemas if schema != {"type": "null"}]
    if {} in schemas:
        return {}
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": _joined([schema["type"] for schema in schemas])}
    if len(others) > 1:
        return {"anyOf": list(schemas)}
    values = {"enum": [*others[0]["enum"], None]} if "enum" in others[0] else {}
    return {**others[0], "type": _joined([others[0]["type"], "null"]), **values}


def _joined(kinds: Sequence[str | list[str]]) -> str | list[str]:
    """Names of types, each once; a single one is no list."""
    names = list(dict.fromkeys(name for kind in kinds for name in ([kind] if isinstance(kind, str) else kind)))
    return names[0] if len(names) == 1 else names


def _not_of_json(hint: Any, where: str) -> ValueError:
    return ValueError(f"{where} has the type {hint}; allowed are str, int, float, bool, None, list, tuple, dict, Any, Literal, "
                      "Enum with values of the first five types, and unions of them")


def pace(tools: Sequence[Tool]) -> dict[str, Any]:
    """The fields `waits` and `at_once` of an environment with these tools: if some run programs, one for each core."""
    return {"waits": True, "at_once": cores()} if any(tool.program for tool in tools) else {}


def run(tools: Sequence[Tool], call: Call) -> Result:
    """The result of a call. Calls that are malformed or unknown, or whose tool raises ToolError, fail with "error: ..."."""
    try:
        if call.error:
            raise ToolError(call.error)
        by_name = {tool.name: tool for tool in tools}
        tool = by_name[registry.one_of("tool", call.name, by_name)]
        check(tool, call.arguments)
    except ValueError as error:
        return _refused(str(error))
    try:
        result = tool.call(**as_typed(tool.parameters, dict(call.arguments)))
    except ToolError as error:
        return _refused(str(error))
    value, failed = result if isinstance(result, Result) else (result, False)
    try:
        return Result(shorten(_text(value)), failed)
    except (ValueError, RecursionError) as error:  # too many digits, too many levels
        return _refused(f"the result of {tool.name} cannot be written ({str(error)[:100]})")


def _text(value: Any) -> str:
    """A result as text: as JSON, or as Python writes it if it is neither text nor JSON."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # of another type, or a list that holds itself
        return str(value)


def as_typed(schema: Any, value: Any) -> Any:
    """The value with its integers as Python has them: in JSON Schema 5.0 is an integer, too."""
    if not isinstance(schema, Mapping):
        return value
    if "anyOf" in schema:
        schema = next((one for one in schema["anyOf"] if _fits(one, value)), {})
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: as_typed(properties.get(name, others), one) for name, one in value.items()}
    if isinstance(value, list):
        parts = [*schema.get("prefixItems", ()), *[schema.get("items")] * len(value)]
        return [as_typed(part, one) for part, one in zip(parts, value)]
    whole = isinstance(value, float) and value.is_integer() and "type" in schema
    return int(value) if whole and "integer" in _kinds(schema) and "number" not in _kinds(schema) else value


def results(tools: Sequence[Tool], calls: Sequence[Call]) -> list[Result]:
    """The result of each call of a message. At most `CALLS` calls are made; the others fail."""
    not_run = _refused(f"a message has at most {CALLS} calls; the other {len(calls) - CALLS} were not run")
    return [run(tools, call) for call in calls[:CALLS]] + [not_run] * (len(calls) - CALLS)


def answers(calls: Sequence[Call], results: Sequence[Result], role: str = "tool") -> list[dict[str, str]]:
    """A message for the result of each call that was made, and one for all calls beyond the limit; long names are cut."""
    shown = list(zip(calls, results))[:CALLS + 1]
    return [{"role": role, "name": call.name[:NAME_LIMIT], "content": result.text} for call, result in shown]


def _refused(why: str) -> Result:
    return Result(shorten(f"error: {why}"), True)


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
    """Raises ToolError if arguments are missing, unknown or not as the schema says.

    Of the schema of an argument `type`, `enum` and `anyOf` are checked. An argument is unknown if the tool's schema has no such
    property, and neither allows others by `additionalProperties` nor lacks `properties` altogether.
    """
    properties = tool.parameters.get("properties", {})
    others = tool.parameters.get("additionalProperties", "properties" not in tool.parameters)
    for name in arguments if others is False else ():
        registry.one_of(f"argument of {tool.name}", name, properties)
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise ToolError(f"{tool.name} needs the argument {missing[0]!r}")
    for name, value in arguments.items():
        schema = properties.get(name, others)
        if not _fits(schema, value):
            raise ToolError(f"argument {name!r} of {tool.name} is {json.dumps(value)[:100]}; allowed is {_allowed(schema)}")


def _fits(schema: Any, value: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False  # True, as {}, allows all
    if "anyOf" in schema and not any(_fits(one, value) for one in schema["anyOf"]):
        return False
    if "enum" in schema:  # true is not 1 in JSON
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
    return any(_is_a(kind, value) for kind in _kinds(schema))


def _is_a(kind: str, value: Any) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _CHECKS.get(kind, object)) and (kind == "boolean" or not isinstance(value, bool))


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", list(_CHECKS))
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _allowed(schema: Any) -> str:
    """What a schema allows, in words."""
    if not isinstance(schema, Mapping):
        return "nothing"
    if "enum" in schema:
        return f"one of {json.dumps(list(schema['enum']), ensure_ascii=False)}"
    return " or ".join(map(_allowed, schema["anyOf"]) if "anyOf" in schema else _kinds(schema))


def shorten(text: str, limit: int = RESULT_LIMIT) -> str:
    """The text, of which at most `limit` characters are kept: the middle of a longer one is cut."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"

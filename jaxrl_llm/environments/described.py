"""The description of tools in words, for chat templates that do not show them."""
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.parsers import WRITERS

_EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


def described(schemas: Sequence[Mapping[str, Any]], parser: str) -> str:
    """The schemas of tools, one a line, and an example of a call that the parser reads; "" for no tools.

    For a parser of your own the form of a call is not known, so there is no example.
    """
    if not schemas:
        return ""
    lines = ["You can call these tools:", *(json.dumps(schema["function"]) for schema in schemas)]
    if parser in WRITERS:
        first = schemas[0]["function"]
        example = WRITERS[parser](first["name"], example_of(first.get("parameters", {})))
        lines += [f"A call is written like this: {example}", "You then read its result."]
    return "\n".join(lines)


def example_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the types that the schema of an object requires, to show the form of a call."""
    properties = parameters.get("properties", {})
    return {name: _value(properties.get(name, {})) for name in parameters.get("required", properties)}


def _value(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0])
    kind = schema.get("type", "string")
    return _EXAMPLES.get(kind if isinstance(kind, str) else kind[0], "...")

"""Tools: schemas of functions, checked calls, results."""
import datetime
import enum
import functools
import json
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
from spoken import call, say

from jaxrl_llm import environments, tasks
from jaxrl_llm.environments import base, tools
from jaxrl_llm.environments.tool_use import of_tools
from jaxrl_llm.environments.tools import Call, ToolError


def book(city: str, nights: int, view: Literal["sea", "yard"] = "yard", tags: list[str] | None = None) -> str:
    """Books a room.

    More words.

    Args:
        city: where: the town
        nights (int): how many
    Returns:
        what was booked: a text
    """
    return f"{nights} in {city}, {view}"


BOOK = tools.of_function(book)


def test_the_schema_of_a_function():
    assert BOOK.schema == {"type": "function", "function": {"name": "book", "description": "Books a room.\n\nMore words.",
                                                           "parameters": {
        "type": "object", "required": ["city", "nights"], "properties": {
            "city": {"type": "string", "description": "where: the town"},
            "nights": {"type": "integer", "description": "how many"},
            "view": {"type": "string", "enum": ["sea", "yard"], "description": ""},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}, "description": ""}}}}}


def test_the_schema_is_as_transformers_makes_it():
    get_json_schema = pytest.importorskip("transformers.utils").get_json_schema

    def add(a: int, b: float, note: str = "") -> str:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
            note: what for
        """
    theirs = get_json_schema(add)["function"]
    ours = tools.of_function(add).schema["function"]
    assert {key: theirs[key] for key in ours} == ours


def weather(city: str, days: int = 1, unit: str = "C", hours: list[int] | None = None) -> str:
    """The weather of a city.

    It is a forecast.

    Args:
        city: Name of the city, in English,
            followed by the country

            note: between 1 and 7
        days (int): how many
            city: is not meant here
        unit: of temperatures (choices: ["C ", "F"])
        hours: which
    followed (choices: of your own)
    Returns:
        unit: the forecast
    """
    return f"{city} {days!r} {hours}"


def test_descriptions_are_as_transformers_reads_them():
    """All lines of a description; a line that names no argument, or is indented deeper, belongs to the one before it."""
    ours = tools.of_function(weather)
    assert {name: one["description"] for name, one in ours.parameters["properties"].items()} == {
        "city": "Name of the city, in English, followed by the country note: between 1 and 7",
        "days": "how many city: is not meant here", "unit": "of temperatures",
        "hours": "which followed (choices: of your own)"}
    assert ours.description == "The weather of a city.\n\nIt is a forecast."
    assert ours.parameters["properties"]["unit"] == {"type": "string", "enum": ["C", "F"], "description": "of temperatures"}
    weather.__annotations__["hours"], weather.__doc__ = list[int], weather.__doc__.replace("(choices: of your own)", "")
    theirs = pytest.importorskip("transformers.utils").get_json_schema(weather)["function"]
    ours = tools.of_function(weather).schema["function"]
    assert {key: theirs[key] for key in ours} == ours


def test_values_of_a_docstring_may_be_null_where_the_type_allows_it():
    def take(x: int | None = None) -> str:
        """Takes.

        Args:
            x: a level (choices: [1, 2])
        """
        return str(x)

    tool = tools.of_function(take)
    assert tool.parameters["properties"]["x"] == {"type": ["integer", "null"], "enum": [1, 2, None], "description": "a level"}
    assert [tools.run([tool], Call("take", {"x": x})).failed for x in (1, None, 3)] == [False, False, True]


class View(enum.Enum):
    SEA = "sea"
    YARD = "yard"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


AS_TRANSFORMERS = [  # types, legal and illegal values
    (Any, [1, "a", None, [True]], []),
    (tuple, [[], [1, "a"]], ["a", None]), (tuple[int, str], [[1, "a"]], [1, {}]), (list[Any], [[1, "a"]], ["a"]),
    (dict[str, int], [{"a": 1}], [[]]), (list[tuple[int, int]], [[[1, 2]]], [1]),
    (View, ["sea"], ["lake", None, 1]), (Level, [1, 2], [3, True, "1"]),
    (Literal[1, "auto"], [1, "auto"], [2, "manual", True, None]), (Literal[True, None], [True, None], [1, False, "null"]),
    (list[int] | str, [[1], "a"], [1, None]), (Literal["auto"] | int, ["auto", 7], ["manual", True]),
    (list[View], [["sea"]], ["sea"]),
]
OURS = [  # types, schemas in which null is a type, as JSON schema has it, or longer lists are allowed; legal and illegal values
    (Literal["x", "y"] | None, {"type": ["string", "null"], "enum": ["x", "y", None]}, ["x", None], ["z", 0]),
    (View | None, {"type": ["string", "null"], "enum": ["sea", "yard", None]}, ["yard", None], ["lake"]),
    (Literal[1, "auto"] | None, {"type": ["integer", "string", "null"], "enum": [1, "auto", None]}, [1, None], [True, "x"]),
    (list[int] | None, {"type": ["array", "null"], "items": {"type": "integer"}}, [[1], None], [1, "a"]),
    (int | str | None, {"type": ["integer", "string", "null"]}, [1, "a", None], [1.5, []]),
    (Any | None, {}, [1, None], []),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}, [[1, 2, 3]], ["a"]),
    (list[int] | Literal["all"] | None,
     {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string", "enum": ["all"]}, {"type": "null"}]},
     [[1], "all", None], ["none", 1]),
]


def typed(hint):
    """A tool whose argument has the type."""
    def take(x) -> str:
        """Takes something.

        Args:
            x: a value
        """
        return json.dumps(x)

    take.__annotations__["x"] = hint
    return take


def assert_checked(tool, legal, illegal):
    for given in legal:
        assert tools.run([tool], Call("take", {"x": given})) == (json.dumps(given), False)
    for given in illegal:
        text, failed = tools.run([tool], Call("take", {"x": given}))
        assert failed and text.startswith(f"error: argument 'x' of take is {json.dumps(given)}; allowed is "), text


@pytest.mark.parametrize("hint, legal, illegal", AS_TRANSFORMERS)
def test_types_that_transformers_takes(hint, legal, illegal):
    get_json_schema = pytest.importorskip("transformers.utils").get_json_schema
    tool = tools.of_function(typed(hint))
    assert tool.parameters == get_json_schema(typed(hint))["function"]["parameters"]
    assert_checked(tool, legal, illegal)


@pytest.mark.parametrize("hint, schema, legal, illegal", OURS)
def test_types_whose_schemas_are_our_own(hint, schema, legal, illegal):
    tool = tools.of_function(typed(hint))
    assert tool.parameters["properties"]["x"] == {**schema, "description": "a value"}
    assert_checked(tool, legal, illegal)


def test_the_refusal_of_a_union_says_what_it_allows():
    text, _ = tools.run([tools.of_function(typed(list[int] | Literal["all", 1]))], Call("take", {"x": "none"}))
    assert text == 'error: argument \'x\' of take is "none"; allowed is array or one of ["all", 1]'


@pytest.mark.parametrize("schema, fits", [
    ({"additionalProperties": True}, True), ({"additionalProperties": {"type": "integer"}}, True), ({}, True),
    ({"additionalProperties": {}, "properties": {"p": {"type": "string"}}}, True),
    ({"additionalProperties": False}, False), ({"properties": {}}, False), ({"properties": {"p": {}}}, False),
    ({"additionalProperties": {"type": "string"}}, False), ({"properties": {"q": False}}, False),
    ({"properties": {"q": True}}, True), ({"properties": {"q": {"type": "image"}}}, True)])
def test_open_schemas_take_other_arguments(schema, fits):
    tool = tools.Tool("g", "", {"type": "object", **schema}, lambda **given: json.dumps(given))
    text, failed = tools.run([tool], Call("g", {"q": 1}))
    assert failed != fits and text.startswith('{"q": 1}' if fits else "error: ")


def test_functions_that_are_no_tools():
    def untyped(x):
        """x"""
    def strange(x: bytes):
        """x"""
    with pytest.raises(ValueError, match="argument 'x' of tool 'untyped' has no type"):
        tools.of_function(untyped)
    with pytest.raises(ValueError, match=r"strange\(x\) has the type .*bytes"):
        tools.of_function(strange)
    for hint in (set, Literal[b"a"], enum.Enum("Bytes", {"A": b"a"}), list[bytes], int | bytes):
        with pytest.raises(ValueError, match=r"take\(x\) has the type .*; allowed are str, int"):
            tools.of_function(typed(hint))
    with pytest.raises(ValueError, match="not given by name"):
        tools.of_function(eval("lambda *x: 0"))


@pytest.mark.parametrize("call, answer", [
    (Call("book", {"city": "Bonn", "nights": 2}), "2 in Bonn, yard"),
    (Call("book", {"city": "Bonn", "nights": 2, "view": "sea"}), "2 in Bonn, sea"),
    (Call("bok", {}), "error: Unknown tool 'bok'. Did you mean 'book'? Allowed: book."),
    (Call("book", {"city": "Bonn"}), "error: book needs the argument 'nights'"),
    (Call("book", {"city": "Bonn", "nights": 2, "night": 1}), "error: Unknown argument of book 'night'. Did you mean 'nights'"),
    (Call("book", {"city": "Bonn", "nights": "2"}), "error: argument 'nights' of book is \"2\"; allowed is integer"),
    (Call("book", {"city": "Bonn", "nights": True}), "error: argument 'nights' of book is true; allowed is integer"),
    (Call("book", {"city": "Bonn", "nights": 2, "view": "lake"}), "error: argument 'view' of book is \"lake\"; allowed is one"),
    (Call("", {}, "not JSON"), "error: not JSON"),
])
def test_calls_are_checked(call, answer):
    result = tools.run([BOOK], call)
    assert result.text.startswith(answer) and result.failed == answer.startswith("error")


@pytest.mark.parametrize("hint, given, got", [
    (int, 5.0, "5"), (int | None, -0.0, "0"), (float, 5.0, "5.0"), (int | float, 5.0, "5.0"), (Any, 5.0, "5.0"),
    (list[int], [1.0, 2], "[1, 2]"), (tuple[int, float], [1.0, 2.0], "[1, 2.0]"), (dict[str, int], {"a": 1.0}, "{'a': 1}"),
    (list[int] | int, 7.0, "7"), (Literal[1, 2], 2.0, "2"), (int, 1e300, str(int(1e300)))])
def test_whole_floats_are_integers_as_json_schema_says(hint, given, got):
    def take(x) -> str:
        return repr(x)

    take.__annotations__["x"] = hint
    assert tools.run([tools.of_function(take)], Call("take", {"x": given})) == (got, False)


@pytest.mark.parametrize("given", [5.5, float("inf"), float("nan"), True])
def test_other_floats_are_no_integers(given):
    assert tools.run([BOOK], Call("book", {"city": "Bonn", "nights": given})).text.endswith("allowed is integer")


class Money:
    def __str__(self) -> str:
        return "5 EUR"


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value, text", [
    (np.int64(5), "5"), (np.float32(0.5), "0.5"), (Money(), "5 EUR"), (Fraction(1, 3), "1/3"),
    (datetime.date(2024, 2, 29), "2024-02-29"),
    ({(1, 2): 3}, "{(1, 2): 3}"), ({"a": {1}}, "{'a': {1}}"), (b"a", "b'a'"), (LOOP, "[[...]]"), (None, "null"),
    ({"a": 1}, '{"a": 1}'),
    (tools.Result(np.int64(7)), "7")])
def test_results_that_are_neither_text_nor_json(value, text):
    """In every environment whose tools are called by `run`."""
    def give() -> Any:
        return value

    tool = tools.of_function(give)
    assert tools.run([tool], Call("give", {})) == (text, False)
    own = of_tools(tasks.make("arithmetic", chat=True), [tool], name="give", parser="hermes", reward=None, turns=3)
    state, _ = base.begin(own, own.task.train[0], 0)
    assert base.advance(own, state, say(call("give"))).messages == [{"role": "tool", "name": "give", "content": text}]


@pytest.mark.parametrize("make", [lambda: 10**5000, lambda: functools.reduce(lambda inner, _: [inner], range(100_000), [])])
def test_results_that_cannot_be_written_are_errors(make):
    tool = tools.Tool("power", "", {"type": "object"}, make)
    text, failed = tools.run([tool], Call("power", {}))
    assert failed and text.startswith("error: the result of power cannot be written (")


def test_faults_of_a_tool_are_no_answers():
    def fails(x: int) -> str:
        """x"""
        if x:
            raise ToolError("not today")
        raise ZeroDivisionError("a bug")
    tool = tools.of_function(fails)
    assert tools.run([tool], Call("fails", {"x": 1})) == ("error: not today", True)
    with pytest.raises(ZeroDivisionError):
        tools.run([tool], Call("fails", {"x": 0}))


def long() -> str:
    return "a" * 10_000 + "z"


def long_error() -> str:
    raise ToolError(long()[7:])  # behind "error: "


@pytest.mark.parametrize("function", [long, long_error])
def test_long_results_lose_their_middle(function):
    text, failed = tools.run([tools.of_function(function)], Call(function.__name__, {}))
    assert len(text) < 8100 and text.endswith("z") and "[2001 characters left out]" in text
    assert failed == (function is long_error)


def test_tools_say_whether_they_failed():
    """The text of a result says nothing about it, in both directions."""
    def build(target: str) -> tools.Result:
        """Builds."""
        return tools.Result(f"{target}: 0 errors" if target == "all" else f"nothing is called {target}", target != "all")

    tool = tools.of_function(build)
    assert tools.run([tool], Call("build", {"target": "all"})) == ("all: 0 errors", False)
    assert tools.run([tool], Call("build", {"target": "x"})) == ("nothing is called x", True)
    listed = tools.Tool("listed", "", {"type": "object", "properties": {}}, lambda: ["error"])
    assert tools.run([listed], Call("listed", {})) == ('["error"]', False)


def test_a_message_has_at_most_four_calls():
    made = []
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = tools.Tool("note", "", schema, lambda n: made.append(n) or str(n))
    calls = [*(Call("note", {"n": n}) for n in range(5)), Call("none", {})]
    results = tools.results([tool], calls)
    assert made == [0, 1, 2, 3] and [result.failed for result in results] == [False] * 4 + [True] * 2
    why = "error: a message has at most 4 calls; the other 2 were not run"
    assert tools.answers(calls, results) == [
        {"role": "tool", "name": "note", "content": text} for text in ("0", "1", "2", "3", why)]
    assert [one["content"] for one in tools.answers(calls[:4], tools.results([tool], calls[:4]))] == ["0", "1", "2", "3"]
    for name in ("tool_use", "faulty_environments:drawers"):
        environment = environments.make(name)
        state, _ = base.begin(environment, environment.task.train[0], 0)
        turn = base.advance(environment, state, say("<tool_call>{}</tool_call>" * 2000))
        assert (turn.info["tool_calls"], turn.info["tool_errors"], len(turn.messages)) == (2000, 2000, 5)
        assert turn.messages[4]["content"].endswith("the other 1996 were not run")


def test_names_of_unknown_tools_are_short():
    calls = [tools.Call(name, {}) for name in ("x" * 100_000, "book")]
    answers = tools.answers(calls, tools.results([], calls))
    assert [answer["name"] for answer in answers] == ["x" * 64, "book"]
    assert all(len(answer["content"]) < 9000 for answer in answers)

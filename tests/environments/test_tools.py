"""Tools: schemas, checked calls, parsers of three formats, your own by name, exact arithmetic, programs, search."""
import contextlib
import datetime
import enum
import functools
import json
import os
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest

from jaxrl_llm import environments, sandbox, tasks
from jaxrl_llm.environments import base, call_kinds, endings, parsers, python_tool, search, tools
from jaxrl_llm.environments.calculator import calculator, value, written
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.environments.tool_use import FACTS, of_tools
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


CALL = {"name": "book", "arguments": {"city": "Bonn"}}


@pytest.mark.parametrize("parse, text, calls", [
    ("hermes", "The answer is 7.", []),
    ("hermes", f"Let me see <tool_call>\n{json.dumps(CALL)}\n</tool_call> and <tool_call>{json.dumps(CALL)}</tool_call>",
     [("book", {"city": "Bonn"}, "")] * 2),
    ("hermes", f"<think>I could say <tool_call>{json.dumps(CALL)}</tool_call></think>7", []),
    ("hermes", f"\n<think>I could say <tool_call>{json.dumps(CALL)}</tool_call> or not", []),
    ("hermes", f"<think>a</think>\n<think>or <tool_call>{json.dumps(CALL)}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "book", "arguments": {"city": "<think>"}}</tool_call>',
     [("book", {"city": "<think>"}, "")]),
    ("hermes", '<think>a</think><tool_call>{"name": "book", "arguments": {"city": "<think>"}}</tool_call>',
     [("book", {"city": "<think>"}, "")]),
    ("hermes", f"<tool_call>{json.dumps(CALL)}", [("", {}, "<tool_call> is not closed by </tool_call>")]),
    ("hermes", "<tool_call>{'name': 1}</tool_call>", [("", {}, "the call is not valid JSON")]),
    ("hermes", '<tool_call>["book"]</tool_call>', [("", {}, 'a call is an object with a "name"')]),
    ("hermes", '<tool_call>{"name": "book", "arguments": 1}</tool_call>', [("book", {}, '"arguments" of a call is an object')]),
    ("hermes", '<tool_call>{"name": "book"}</tool_call>', [("book", {}, "")]),
    ("hermes", "</tool_call><tool_call>" + "[" * 100_000 + "</tool_call>", [("", {}, "the call is not valid JSON")]),
    ("llama3", "The answer is 7.", []),
    ("llama3", '{"name": "book", "parameters": {"city": "Bonn"}}', [("book", {"city": "Bonn"}, "")]),
    ("llama3", ' <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": "};{"}}',
     [("a", {}, ""), ("b", {"x": "};{"}, "")]),
    ("llama3", '{"name": "book", "parameters": {', [("", {}, "the call is not valid JSON")]),
    ("llama3", '{"name": "a", "parameters": {}} is what I would call', []),
    ("llama3", "{7}", []),
    ("llama3", '{"answer": 7}', []), ("llama3", '{"answer": 7}; {"name": "a", "parameters": {}}', []),
    ("llama3", '{"name": "a", "parameters": {}}; {"answer": 7}',
     [("a", {}, ""), ("", {}, 'a call is an object with a "name"')]),
    ("llama3", '{"name": ["book"], "parameters": {}}', [("", {}, 'a call is an object with a "name"')]),
    ("llama3", '{"a":' * 100_000, []),
    ("pythonic", "The answer is 7.", []), ("pythonic", "[7]", []), ("pythonic", "(7 + 5)", []),
    ("pythonic", "f(2) = 7, so the answer is \\boxed{7}", []), ("pythonic", "P(A) = 0.5", []), ("pythonic", "f(1) + g(2)", []),
    ("pythonic", "f(x) = (x + 1)(x - 1)", []), ("pythonic", "f(g(x)), that's 7 (seven)", []), ("pythonic", "f(x) == 7", []),
    ("pythonic", 'book(city="Bonn :)")  # )', [("book", {"city": "Bonn :)"}, "")]),
    ("pythonic", "book(city=\"a)\\\")\" nights='2)')", [("", {}, "the call is no Python expression")]),
    ("pythonic", 'book(city="Bonn"', [("", {}, "the call is no Python expression")]),
    ("pythonic", 'book(city="Bonn", nights=)\n', [("", {}, "the call is no Python expression")]),
    ("pythonic", 'book(city="Bonn")\n\nThen', []), ("pythonic", "f(2)(3)", [("", {}, "a call is written")]),
    ("pythonic", '[book(city="Bonn")]', [("book", {"city": "Bonn"}, "")]),
    ("pythonic", ' <|python_tag|>book(city="Bonn, (Rhine)", nights=-2, rooms=[1, {"a": None}])',
     [("book", {"city": "Bonn, (Rhine)", "nights": -2, "rooms": [1, {"a": None}]}, "")]),
    ("pythonic", "[a(), b(x='];')]", [("a", {}, ""), ("b", {"x": "];"}, "")]),
    ("pythonic", '<think>[book(city="Bonn")]</think>7', []),
    ("pythonic", '[book(city="Bonn")', [("", {}, "the call is no Python expression")]),
    ("pythonic", '[book(city="Bonn")] is what I would call', [("", {}, "the call is no Python expression")]),
    ("pythonic", '[book(city="Bonn"), 7]', [("book", {"city": "Bonn"}, ""), ("", {}, "a call is written")]),
    ("pythonic", 'book("Bonn")', [("book", {}, "arguments are given by name")]),
    ("pythonic", "book(**{'city': 'Bonn'})", [("book", {}, "arguments are given by name")]),
    ("pythonic", "book(city=__import__('os').system('true'))", [("book", {}, "arguments of a call are literals")]),
    ("pythonic", "book(city={1, 2})", [("book", {}, "arguments of a call are literals")]),
    ("pythonic", "book(city=b'7')", [("book", {}, "arguments of a call are literals")]),
    ("pythonic", "book(city=(1, 2.5))", [("book", {"city": [1, 2.5]}, "")]),
    ("pythonic", "book(city=1 + 2, " + "x=" + "(" * 100_000, [("", {}, "the call is no Python expression")]),
    ("fenced", "```python\nprint(1)\n```\nor\n```python\nprint(2)\n```", [("python", {"code": "print(2)"}, "")]),
    ("fenced", "```python\nprint(1)", []),
    ("fenced", "<think>```python\nprint(1)\n```</think>7", []), ("fenced", "<think>```python\nprint(1)\n```", []),
])
def test_parsers(parse, text, calls):
    actual = parsers.PARSERS[parse](text)
    assert len(actual) == len(calls)
    for call, (name, arguments, error) in zip(actual, calls):
        assert (call.name, call.arguments, bool(call.error)) == (name, arguments, bool(error))
        assert call.error.startswith(error)


WRITE = {"name": "write", "arguments": {"text": "a</think>b"}}
WRITTEN = [("write", {"text": "a</think>b"}, "")]
HERMES, LLAMA3, PYTHONIC = f"<tool_call>{json.dumps(WRITE)}</tool_call>", json.dumps(WRITE), '[write(text="a</think>b")]'
PRINTS = 'print("a</think>b")'


@pytest.mark.parametrize("parse, text, calls", [
    ("hermes", HERMES, WRITTEN), ("hermes", f"<think>or not</think>{HERMES}{HERMES}", WRITTEN * 2),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "close with </tool_call> tag"}}</tool_call>',
     [("write", {"text": "close with </tool_call> tag"}, "")]),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "</tool_call></think>\\"<tool_call>"}}\n</tool_call>.',
     [("write", {"text": '</tool_call></think>"<tool_call>'}, "")]),
    ("hermes", f'<think>between "<tool_call>" and "</tool_call>" I write {HERMES}</think>7', []),
    ("hermes", f'a thought with "<tool_call>" in it</think>{HERMES}', WRITTEN),
    ("hermes", f"<think>{HERMES} is not the end of this", []),
    ("hermes", f'<tool_call>{{"name": "write</tool_call>{HERMES}', [("", {}, "the call is not valid JSON"), *WRITTEN]),
    ("llama3", LLAMA3, WRITTEN), ("llama3", f"<think>or not</think>\n{LLAMA3}; {LLAMA3}", WRITTEN * 2),
    ("llama3", f"<|python_tag|>{LLAMA3}", WRITTEN), ("llama3", f"{{say {LLAMA3}</think>7", []),
    ("pythonic", PYTHONIC, WRITTEN), ("pythonic", f"That's it</think>{PYTHONIC}", WRITTEN),
    ("pythonic", "write(text='a</think>b')", WRITTEN), ("pythonic", f"{PYTHONIC}, or not</think>7", []),
    *[("fenced", f"```{mark}\n{PRINTS}\n```", [("python", {"code": PRINTS}, "")]) for mark in ("python", "py", "Python3")],
    ("fenced", f"<think>```python\nprint(1)</think>```python\n{PRINTS}\n```", [("python", {"code": PRINTS}, "")]),
    ("fenced", f"<think>```python\n{PRINTS}\n``` is a program", []),
    ("fenced", "```python\nx = </think>\n```python\nprint(1)\n```", [("python", {"code": "print(1)"}, "")]),
])
def test_marks_that_a_call_quotes(parse, text, calls):
    assert [(call.name, call.arguments, call.error[:26]) for call in parsers.PARSERS[parse](text)] == calls


@pytest.mark.parametrize("arguments, read", [
    ("null", {}), ('""', {}), ('"{}"', {}), ('"{\\"city\\": \\"Bonn\\"}"', {"city": "Bonn"}),
    ('null, "parameters": {"city": "Bonn"}', {"city": "Bonn"}), ("[" * 99 + "]" * 99, None), ('"[1]"', None), ('"Bonn"', None)])
def test_arguments_that_are_missing_or_a_text(arguments, read):
    for parse, text in (("hermes", f'<tool_call>{{"name": "book", "arguments": {arguments}}}</tool_call>'),
                        ("llama3", f'{{"name": "book", "arguments": {arguments}}}')):
        (one,) = parsers.PARSERS[parse](text)
        assert (one.name, one.arguments, bool(one.error)) == ("book", read or {}, read is None)


def test_arguments_that_are_nested_too_deeply():
    """Tools, copies of states and other formats walk through arguments by recursion."""
    for levels, error in ((99, ""), (100, "the arguments are nested deeper than 100 levels")):
        nested = "[" * levels + "]" * levels
        texts = {"hermes": f'<tool_call>{{"name": "f", "arguments": {{"x": {nested}}}}}</tool_call>',
                 "llama3": f'{{"name": "f", "parameters": {{"x": {nested}}}}}', "pythonic": f"f(x={nested})"}
        for parse, text in texts.items():
            assert [call.error for call in parsers.PARSERS[parse](text)] == [error]


@pytest.mark.parametrize("expression, result", [
    ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("0.1 + 0.2", "0.3"), ("7 / 2", "3.5"), ("1/3", "0.333333333333 (1/3)"),
    ("7 // 2", "3"), ("-7 % 3", "2"), ("2 ** 10", "1024"), ("2^-2", "0.25"), ("-3 \u00d7 \u22122", "6"), ("8 \u00f7 4", "2"),
    ("1e3 * 1.50", "1500"), ("  5\n", "5"), ("2**2**3", "256"), ("(-8) ** 3", "-512"), ("10**400 / 10**399", "10"),
    ("0.12345678901234567891 * 1e20", "12345678901234567891"), ("-" * 491 + "1", "-1"),
])
def test_the_calculator_is_exact(expression, result):
    assert tools.run([calculator()], Call("calculator", {"expression": expression})) == (result, False)


@pytest.mark.parametrize("expression, why", [
    ("1/0", "division by zero"), ("0 ** -1", "division by zero"), ("5 % 0", "division by zero"), ("9**9**9**9", "too large"),
    ("2**100000", "too large"), ("1e9999999", "too large"), ("1e-9999999", "too small"), ("2**0.5", "not an integer"),
    ("__import__('os').getcwd()", "not allowed"),
    ("().__class__", "not allowed"), ("'a' * 9", "not allowed"), ("[1][0]", "not allowed"), ("lambda: 1", "not allowed"),
    ("True + 1", "not allowed"), ("1j", "not allowed"), ("x := 1", "no arithmetic expression"),
    ("1 +", "no arithmetic expression"),
    ("", "no arithmetic expression"), ("1; 2", "no arithmetic expression"), ("(" * 400, "no arithmetic expression"),
    ("1 if 1 else 2", "not allowed"), ("f'{1}'", "not allowed"),
    ("1 " * 600, "1199 characters"), ("\x00", "no arithmetic expression"), ("1 < 2", "not allowed"),
    ("(0.5)**100000000000", "too large"), ("1_0 + \ud800", "no arithmetic expression"),
])
def test_the_calculator_refuses_what_is_no_arithmetic(expression, why):
    answer, failed = tools.run([calculator()], Call("calculator", {"expression": expression}))
    assert answer.startswith("error: ") and why in answer and failed


def test_numbers_are_written_so_that_they_say_what_they_are():
    for text in ("3.25", "-0.001", "123456789.5"):
        assert written(value(text)) == text
    assert written(Fraction(10**400 + 1, 3)).startswith("? (1")
    assert written(Fraction(1, 2**60)).endswith(f"(1/{2**60})"), "rounding is shown"


linux = pytest.mark.skipif(bool(sandbox.best().missing), reason="no sandbox with all barriers on this machine")


@linux
def test_programs_run_in_the_sandbox(tmp_path):
    tool = python_tool.python(deadline=20.0)
    def run(code):
        return tools.run([tool], Call("python", {"code": code})).text
    assert run("print(6 * 7)") == "42" and run("x = 1") == "(nothing was printed)"
    assert run("print('a'); 1/0").startswith("a\nTraceback") and "ZeroDivisionError" in run("1/0")
    assert run("def (") == "error: the program is not valid Python"
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    assert "Error" in (seen := run(f"print(open({str(secret)!r}).read())")) and "the answer" not in seen
    assert "code 3" in run("import os; os._exit(3)")
    assert os.environ.get("HOME", "/root") not in run("import os; print(os.environ)")
    assert "more than" in run("print('a' * 10**8)") and "MemoryError" in run("x = bytearray(10**10)")
    assert run("y = 1") and "NameError" in run("print(y)"), "nothing is kept"
    brief = python_tool.python(deadline=0.5)
    stopped = tools.run([brief], Call("python", {"code": "while True: pass"}))
    assert "stopped after 0.5 seconds" in stopped.text and stopped.failed


@linux
@pytest.mark.parametrize("code, said, failed", [
    ("print('0 errors')", "0 errors", False), ("raise Exception('x')", "Exception: x", True),
    ("import sys; print('Error'); sys.exit(0)", "Error", False), ("import sys; print('fine'); sys.exit(1)", "code 1", True),
    ("import sys; print('an error', file=sys.stderr)", "(nothing was printed)", False),
    ("def (", "error: the program is not valid Python", True), ("print('a' * 10**8)", "bytes", True),
    ("import os; os._exit(3)", "code 3", True), ("\ud800", "", True)])
def test_a_program_fails_by_how_it_ends(code, said, failed):
    result = tools.run([python_tool.python(deadline=20.0)], Call("python", {"code": code}))
    assert result.text.endswith(said) and result.failed == failed
    if said == "Exception: x":
        assert "error" not in result.text.lower(), "the text does not say so"


def test_the_python_tool_refuses_where_a_barrier_is_missing(monkeypatch):
    from jaxrl_llm.sandbox import barriers
    weak = barriers.BarrierReport("limits", frozenset(barriers.BARRIERS) - {"files"})
    monkeypatch.setattr(barriers, "best", lambda: weak)
    monkeypatch.setattr(barriers, "probes", lambda: [weak])
    with pytest.raises(sandbox.SandboxError, match=r"these barriers do not hold: files .*Install bubblewrap"):
        environments.make("tool_use", tools=["python"])


def say(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_dialogue_with_tools():
    environment = environments.make("tool_use", task="arithmetic", options={"chat": True, "level": "mul2"}, turns=3)
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    problem = environment.task.train[5]
    state, opening = base.begin(environment, problem, 0)
    assert [message["role"] for message in opening.messages] == ["user"]
    expression = opening.messages[0]["content"].removeprefix("What is ").split("?")[0]
    turn = base.advance(environment, state, say(call("calculator", expression=expression) + call("no")))
    assert turn.messages[0] == {"role": "tool", "name": "calculator", "content": problem.answer}
    assert turn.messages[1]["content"].startswith("error: Unknown tool 'no'") and not turn.done and turn.reward == 0.0
    last = base.advance(environment, state, say(f"It is {turn.messages[0]['content']}"))
    assert (last.reward, last.done, last.info) == (1.0, True, {
        "action": f"answer {problem.answer}", "tool_calls": 0, "tool_errors": 0, "answer_blocks": 1, "malformed": False,
        "void": False, "tool_failed": 0, "tool_unknown": 0, "error_words": 0})
    state, _ = base.begin(environment, problem, 0)
    for count in range(3):
        turn = base.advance(environment, state, say(call("calculator", expression=expression)))
        assert turn.done == (count == 2) and turn.reward == 0.0
    assert turn.info["out_of_turns"] and not turn.messages


@pytest.mark.parametrize(("text", "facts"), (
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>', (1, 0, 0, False, False, 0, 0, 0)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>', (1, 1, 0, False, False, 1, 0, 1)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": 1}}</tool_call>', (1, 1, 0, False, False, 1, 0, 1)),
    ('<tool_call>{"name": "calculator", ', (1, 1, 0, True, True, 0, 0, 1)),  # never closed
    (r"\boxed{7} or \boxed{8}", (0, 0, 2, False, False, 0, 0, 0)), ("The answer is 7", (0, 0, 0, False, True, 0, 0, 0)),
    ('<tool_call>{"name": "abacus"}</tool_call>', (1, 1, 0, False, False, 0, 1, 1)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>' * 6, (6, 2, 0, False, False, 2, 0, 2)),
    ("", (0, 0, 0, False, True, 0, 0, 0)),
))
def test_facts_of_a_turn(text, facts):
    environment = environments.make("tool_use", reward="boxed")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    info = base.advance(environment, state, say(text)).info
    assert tuple(info[name] for name in environment.facts) == facts and info.keys() == {*environment.facts, "action"}


@pytest.mark.parametrize("turn, void", [
    ("```python\nprint(1)\n```", False), (r"so it is \boxed{7}", False), ("the answer is 7", True),
    ("```python\nprint(1)", True), (r"\boxed{7", True), ("```\nprint(1)\n```", True), ("", True),
    ("first\n```python\nx = 1\n```\nthen more", False), ("<answer>7</answer>", False), ("<answer>7", True)])
def test_void_turns(turn, void):
    assert endings.is_void(turn, parsers.fenced(turn)) == void
    assert not endings.is_void(call("calculator", expression="1"), parsers.hermes(call("calculator", expression="1")))


@pytest.mark.parametrize(("text", "reward"), [
    ('<tool_call>{"name": "calculator", ', 0.0), ('<tool_call>{"name": "calculator"</tool_call>{answer}', 0.0),
    ("{answer}", 1.0)])
def test_a_void_turn_ends_the_dialogue(text, reward):
    """Malformed calls alone earn nothing; the verifier reads an answer without a box, and the turn is void all the same."""
    for ends in (True, False):
        environment = environments.make("tool_use", void_ends=ends)
        problem = environment.task.train[5]
        state, _ = base.begin(environment, problem, 0)
        turn = base.advance(environment, state, say(text.replace("{answer}", problem.answer)))
        answers = not text.startswith("<")
        assert (turn.done, turn.info["void"]) == ((True, True) if ends else (answers, not answers))
        assert turn.reward == reward
    environment = environments.make("tool_use", void_ends=True)
    state, _ = base.begin(environment, problem, 0)
    assert not base.advance(environment, state, say(rf"\boxed{{{problem.answer}}}")).info["void"]


def test_the_policy_reads_that_its_last_turn_comes():
    environment = environments.make("tool_use", turns=3, asks=True)
    state, _ = base.begin(environment, environment.task.train[5], 0)
    first, second, third = [base.advance(environment, state, say(call("calculator", expression="1+1"))) for _ in range(3)]
    assert first.messages[-1]["content"] == "2" and second.messages[-1]["content"] == f"2\n{endings.LAST}"
    assert third.done and third.info["out_of_turns"]


def test_answers_are_checked_before_the_end():
    environment = environments.make("tool_use", turns=4, checks=2)
    problem = environment.task.train[5]
    state, _ = base.begin(environment, problem, 0)
    said = ("0", call("calculator", expression="1+1"), "1", problem.answer)
    told = [base.advance(environment, state, say(text)) for text in said]
    assert [turn.done for turn in told] == [False, False, False, True] and [turn.reward for turn in told] == [0, 0, 0, 1]
    assert told[0].messages == told[2].messages == [{"role": "user", "content": endings.CHECK}]
    state, _ = base.begin(environment, problem, 0)
    for _ in range(3):
        base.advance(environment, state, say(call("calculator", expression="1+1")))
    last = base.advance(environment, state, say(problem.answer))
    assert last.done and last.reward == 1, "an answer at the last turn counts"
    with pytest.raises(ValueError, match="checks=8 of answers in a dialogue of turns=8; give 0 to 7"):
        environments.make("tool_use", checks=8)


def test_searches_and_queries_are_counted():
    """The same search with other spaces is repeated, in a later message too; calls of other tools count as nothing."""
    environment = environments.make("tool_use", tools={"own_tools:weather": {}, "calculator": {}},
                                    kinds={"weather": "search", "calculator": "query"})
    assert environment.facts == FACTS | dict.fromkeys(call_kinds.COUNTS, "count")
    state, _ = base.begin(environment, environment.task.train[5], 0)
    bonn, rome = call("weather", city="Bonn"), call("weather", city="Rome")
    said = (bonn + call("weather", city=" Bonn") + rome, bonn + call("calculator", expression="1+1"),
            call("dice") + "<tool_call>", "7")
    seen = [base.advance(environment, state, say(text)).info for text in said]
    assert [tuple(info[name] for name in call_kinds.COUNTS) for info in seen] == [
        (2, 1, 0, 0), (0, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0)]
    with pytest.raises(ValueError, match="tool in kinds 'calculater'. Did you mean 'calculator'"):
        environments.make("tool_use", kinds={"calculater": "query"})
    with pytest.raises(ValueError, match="kind of the tool 'calculator' 'serch'. Did you mean 'search'"):
        environments.make("tool_use", kinds={"calculator": "serch"})


@linux
def test_a_program_prints_the_answer():
    environment = environments.make("tool_use", tools=["python"], parser="fenced", printed=True, turns=1, reward="boxed")
    problem = environment.task.train[5]
    for code, reward in ((rf"print('\boxed{{{problem.answer}}}')", 1.0), (r"print('\boxed{no}')", 0.0), ("print(1)", 0.0)):
        state, _ = base.begin(environment, problem, 0)
        turn = base.advance(environment, state, say(f"```python\n{code}\n```"))
        assert turn.done and turn.reward == reward and turn.info.get("out_of_turns", False) == (code == "print(1)")
        assert turn.info["tool_calls"] == 1 and turn.info["tool_errors"] == 0


@linux
def test_outputs_of_programs_are_cut():
    tool = python_tool.python(deadline=20.0, brief=20)
    long = tools.run([tool], Call("python", {"code": "print('a' * 30 + 'b' * 30)"})).text
    assert long == f"{'a' * 10}\n[40 characters left out]\n{'b' * 10}"
    failed = tools.run([tool], Call("python", {"code": "print(1)\nraise ValueError('x')"}))
    assert failed.failed and failed.text == "1\nValueError: x"
    with pytest.raises(ValueError, match="brief=-1"):
        python_tool.python(brief=-1)


@linux
def test_a_dialogue_with_programs_in_fences():
    environment = environments.make("tool_use", tools=["python"], parser="fenced")
    problem = environment.task.train[5]
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages[0]["role"] == "system" and "```python" in opening.messages[0]["content"] and not environment.tools
    turn = base.advance(environment, state, say(f"```python\nprint({problem.answer} + 0)\n```"))
    assert turn.messages == [{"role": "user", "name": "python", "content": problem.answer}]
    assert base.advance(environment, state, say(problem.answer)).reward == 1.0


def test_messages_before_the_problem_and_calls_in_python():
    preface = [{"role": "system", "content": "Call."}, {"role": "user", "content": "1 + 1?"},
               {"role": "assistant", "content": '[calculator(expression="1 + 1")]'}, {"role": "tool", "content": "2"}]
    environment = environments.make("tool_use", parser="pythonic", preface=preface)
    problem = environment.task.train[3]
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages[:4] == preface and opening.messages[4:] == list(problem.prompt)
    call = environment.oracle(state)
    assert call.startswith('[calculator(expression="') and call.endswith('")]')
    turn = base.advance(environment, state, say(call))
    assert turn.messages == [{"role": "tool", "name": "calculator", "content": problem.answer}]
    assert base.advance(environment, state, say(environment.oracle(state))).reward == 1.0


def test_names_of_tools_and_parsers():
    with pytest.raises(ValueError, match="Unknown tool 'calculater'. Did you mean 'calculator'"):
        environments.make("tool_use", tools=["calculater"])
    with pytest.raises(ValueError, match="Unknown parser of calls 'hermess'. Did you mean 'hermes'"):
        environments.make("tool_use", parser="hermess")
    with pytest.raises(ValueError, match="the parser 'fenced' calls the tool 'python' alone"):
        environments.make("tool_use", parser="fenced")
    with pytest.raises(ValueError, match="keyword of tool 'python' 'dedline'. Did you mean 'deadline'"):
        environments.make("tool_use", tools={"python": {"dedline": 1.0}})


@pytest.mark.parametrize("kind", ["tool_use", "memory_use"])
def test_tools_of_your_own_by_name(kind):
    environment = environments.make(kind, tools={"own_tools:weather": {}, "own_tools:dice": {"sides": 20}, "calculator": {}})
    assert environment.name == "arithmetic/digit+weather+dice+calculator" + "+memory" * (kind == "memory_use")
    assert [tool["function"]["name"] for tool in environment.tools] == ["weather", "dice", "calculator"]
    state, _ = base.begin(environment, environment.task.train[0], 0)
    said = base.advance(environment, state, say(call("weather", city="Bonn") + call("dice") + call("weather", city="Atlantis")
                                                + call("weather", city=1))).messages
    answers = ['{"Bonn": 1}', "20", "error: no such city", "error: argument 'city' of weather is 1; allowed is string"]
    assert [message["content"].partition("\n")[0] for message in said] == answers


@pytest.mark.parametrize("kind", ["tool_use", "memory_use"])
def test_a_parser_of_your_own_by_name(kind):
    environment = environments.make(kind, tools=["calculator", "own_tools:weather"], parser="own_tools:called")
    problem = environment.task.train[0]
    state, _ = base.begin(environment, problem, 0)
    turn = base.advance(environment, state, say("!weather Bonn and " + call("weather", city="Rome")))
    assert [message["content"].partition("\n")[0] for message in turn.messages] == ['{"Bonn": 1}']
    state, _ = base.begin(environment, problem, 0)
    assert environment.oracle(state) == problem.answer, "no call: nothing writes one for this parser"
    assert base.advance(environment, state, say(problem.answer)).reward == 1.0


def test_processes_import_tools_of_your_own():
    options = {"tools": ["own_tools:weather"], "parser": "own_tools:called"}
    with contextlib.closing(Runner("tool_use", options, seed=0, kind="processes", workers=1, deadline=60.0)) as runner:
        runner.reset({0: runner.environment.task.train[0]})
        assert runner.step({0: say("!weather Bonn")})[0].messages[0]["content"] == '{"Bonn": 1}'


@pytest.mark.parametrize("options, why", [
    ({"tools": ["own_tools:wether"]}, "Unknown function of own_tools 'wether'. Did you mean 'weather'"),
    ({"tools": ["own_tool:weather"]}, "tool 'own_tool:weather': there is no module 'own_tool' on the path"),
    ({"tools": ["own_tools:"]}, "names no function; write module:function"),
    ({"tools": ["own_tools:Weather"]}, "is no function, or an asynchronous one; the environment `methods_of` takes a class"),
    ({"tools": ["own_tools:slow"]}, "is no function, or an asynchronous one"),
    ({"tools": ["own_tools:lying"]}, "returned a str; it must return a jaxrl_llm.environments.tools.Tool"),
    ({"tools": {"own_tools:dice": {"side": 3}}}, "tool 'own_tools:dice' takes .*sides: int = 6.*unexpected keyword"),
    ({"tools": {"own_tools:weather": {"days": 3}}}, r"is called by the policy and takes no options, got \['days'\]"),
    ({"tools": ["own_tools:weather", "own_tools:other_weather"]}, "have the names .*'weather', 'weather'"),
    ({"tools": ["own_tools:weather"], "parser": "fenced"}, r"calls the tool 'python' alone, got the tools \['weather'\]"),
    ({"parser": "own_tools:caled"}, "Unknown function of own_tools 'caled'. Did you mean 'called'"),
])
def test_wrong_names_of_your_own(options, why):
    with pytest.raises(ValueError, match=why):
        environments.make("tool_use", **options)


def programs() -> environments.Environment:
    """A tool whose text has nothing to do with whether it fails."""
    tool = tools.Tool("run", "", {"type": "object", "properties": {"fails": {"type": "boolean"}}},
                      lambda fails: tools.Result("broken" if fails else "0 errors", fails))
    return of_tools(tasks.make("arithmetic", chat=True), [tool], name="programs", parser="hermes", reward=None, turns=8)


def test_facts_follow_the_tool_and_not_its_words():
    environment = programs()
    state, _ = base.begin(environment, environment.task.train[0], 0)
    for fails in (False, True):
        info = base.advance(environment, state, say(call("run", fails=fails))).info
        assert (info["tool_errors"], info["tool_failed"], info["error_words"]) == (fails, fails, not fails)


def test_a_good_call_is_not_corrected_whatever_its_result_says():
    environment = environments.make("purified", environment="test_tools:programs")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    turns = [base.advance(environment, state, say(call("run", fails=fails))) for fails in (False, True, False)]
    assert [turn.messages[0]["content"] for turn in turns] == ["0 errors", "broken", "0 errors"]
    assert [bool(turn.rewritten) for turn in turns] == [False, False, True], "the second call is corrected, not the first"


DOCUMENTS = [{"title": "Spiders", "text": "A spider has eight legs."}, {"text": "A horse has four legs and a mane."},
             {"title": "Tea", "text": "Tea is made of leaves. " + "x" * 2000}]


def test_search(tmp_path):
    pytest.importorskip("bm25s")
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n")
    environment = environments.make("tool_use", tools={"search": {"path": str(path), "results": 2}})
    state, _ = base.begin(environment, environment.task.train[0], 0)
    def ask(query):
        return base.advance(environment, state, say(call("search", query=query))).messages[0]["content"]
    actual = ask("How many legs has a spider?")
    assert actual.startswith("[1] Spiders\nA spider has eight legs.\n\n[2] \nA horse")
    assert ask("quantum chromodynamics") == ask("?! the") == ask("") == "(nothing found)"
    assert len(ask("tea leaves")) < 1100 and ask("spider " * 5000).startswith("[1] Spiders")
    path.write_text('{"text": "tea\u2028and\x85 milk"}\r\n{"title": null, "text": "horse"}\n',  # only \n ends a line
                    encoding="utf-8")
    assert search.read_documents(str(path)) == [("", "tea\u2028and\x85 milk"), ("", "horse")]
    for text, why in (("", "holds no documents"), ('{"text": "the of a"}', "1 documents without a word to find them by"),
                      ("{}", "line 1: expected an object with 'text'"), ("[1]", "line 1"),
                      ('{"text": 1}', "its text is not a text")):
        other = tmp_path / f"{len(text)}.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match=why):
            environments.make("tool_use", tools={"search": {"path": str(other)}})


def test_search_says_which_package_is_missing(monkeypatch, tmp_path):
    import sys
    monkeypatch.setitem(sys.modules, "bm25s", None)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"needs the package bm25s, .*pip install 'jaxrl_llm\[environments\]'"):
        environments.make("tool_use", tools={"search": {"path": str(tmp_path / "x.jsonl")}})

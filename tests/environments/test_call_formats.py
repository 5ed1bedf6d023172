"""Parsers of calls, in three formats."""
import json

import pytest

from jaxrl_llm.environments import parsers

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

"""Tests of programs in the forms that data sets have, read as the reward `code` runs them.

A test is `{"input", "output"}`, two texts, or `{"function", "args", "result"}`: a list of JSON values, or its text in Python,
and a JSON value. LiveCodeBench's tests of functions and lists of `assert` statements become such calls.
"""
import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

_READ = {"input", "output", "function", "args", "result", "wrapped", "truth", "testtype", "type", "fn_name", "func_name",
         "metadata"}
# What changes the meaning of a test and is not read: checkers, files, code around the program.
_OTHER_MEANING = {"checker", "generated_checker", "compare_func", "special_judge", "spj", "interactive", "interactor",
                  "tolerance", "files", "input_file", "output_file", "assert", "assertion", "test_code", "setup", "setup_code"}
_STREAMS, _CALLS = {"stdin", "stdin_stdout", "standard_input"}, {"functional", "function_call", "call_based"}


def read(tests: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tests of a problem as `run_test` takes them; `row` holds its other columns, such as `metadata` and `entry_point`.

    Raises ValueError: no tests, none that a program without output fails, or a test in a form that is not read.
    """
    if isinstance(tests, str) and "assert" in tests:
        tests = of_asserts(tests, row)
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests):
        tests = of_asserts("\n".join(map(str, tests)), row)
    made = [_read(test, row) for test in tests] if isinstance(tests, list | tuple) else tests
    if not well_formed(made):
        raise ValueError("tests are a list of objects with input and output, which are texts and not all blank, or with "
                         f"function, args and result, or of assert statements, got {str(tests)[:200]}")
    return made


def well_formed(tests: Any) -> bool:
    """Whether these are tests as `run_test` takes them, at least one of which a program without output does not pass."""
    def is_test(test: Any) -> bool:
        if not isinstance(test, dict):
            return False
        if test.get("function"):
            return isinstance(test["function"], str) and isinstance(test.get("args") or [], list | str) and "result" in test
        return isinstance(test.get("input") or "", str) and isinstance(test.get("output"), str)

    return isinstance(tests, list | tuple) and all(map(is_test, tests)) and any(
        test.get("function") or test["output"].strip() for test in tests)


def is_call(test: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the input and the output of a test are the arguments and the result of a function, and no streams.

    Raises ValueError for an unknown `testtype`.
    """
    kind = test.get("testtype") or (test["type"] if test.get("type") in _STREAMS | _CALLS else None)
    if kind and kind not in _STREAMS | _CALLS:
        raise ValueError(f"a test has the testtype {kind!r}; read are {', '.join(sorted(_STREAMS | _CALLS))}")
    return kind in _CALLS or not kind and bool(function_of(test) or function_of(row))


def _read(test: Any, row: Mapping[str, Any]) -> Any:
    """A test with an input and an output as the call that it stands for, if it stands for one; anything else as it is."""
    if not isinstance(test, dict):
        return test
    _refuse_other_meaning(test)
    if test.get("function"):
        if isinstance(test.get("args"), str):
            _literals(test["args"])
        return test
    if not is_call(test, row):
        return test
    function = function_of(test) or function_of(row)
    if not function:
        raise ValueError(f"a test of a function, {str(test)[:80]}, lacks its name: give func_name in the test, or in the "
                         "column metadata of the problem")
    return call(function, test.get("input"), test.get("output"))


def _refuse_other_meaning(test: Mapping[str, Any]) -> None:
    """Raises ValueError for a key that changes the meaning of a test and is not read; warns of other keys that are not."""
    given = {key for key, value in test.items() if value not in (None, "", False, [], {})} - _READ
    if changing := given & _OTHER_MEANING:
        raise ValueError(f"a test has {', '.join(sorted(changing))}, which is not read and would change its verdict: "
                         f"{str(dict(test))[:80]}; write it as input and output, or as function, args and result")
    if given:
        warnings.warn(f"keys of tests of programs that are not read: {', '.join(sorted(map(str, given)))}", RuntimeWarning,
                      stacklevel=3)


# --- calls by lines of JSON ---------------------------------------------------------------------------------------------


def function_of(described: Mapping[str, Any]) -> str:
    """The function that `fn_name`, `func_name` or a `metadata` (an object, or its JSON) names; "" without one."""
    metadata = described.get("metadata")
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except (ValueError, RecursionError):  # of something else
        metadata = None
    sources = [source for source in (described, metadata) if isinstance(source, Mapping)]
    return str(next(filter(None, (source.get(key) for source in sources for key in ("fn_name", "func_name"))), ""))


def call(function: str, given: Any, expected: Any) -> dict[str, Any]:
    """A call whose arguments are lines of JSON and whose result is JSON, or an argument list and a value.

    Raises ValueError for anything else.
    """
    if isinstance(given, list):
        return {"function": function, "args": given, "result": expected} | (
            {"wrapped": True} if isinstance(expected, list) and len(expected) == 1 else {})
    if not isinstance(given, str) or not isinstance(expected, str):
        raise ValueError(f"a test of the function {function!r} has the input {str(given)[:80]!r} and the output "
                         f"{str(expected)[:80]!r}; give lines of JSON, one for each argument, and JSON, or a list and a value")
    try:
        args = [json.loads(line) for line in given.strip("\n").split("\n")] if given.strip() else []
        return {"function": function, "args": args, "result": json.loads(expected)}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a test of the function {function!r} has no JSON in each line, {given[:80]!r} and {expected[:80]!r}: "
                         f"{error}") from error


# --- assert statements --------------------------------------------------------------------------------------------------


def of_asserts(source: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls of statements such as `assert f((1, 2)) == [3]` (MBPP), or within `def check(candidate):` (HumanEval).

    What is called and compared is outside of the sandbox, so that a program cannot change it: arguments and results are
    literals, and nothing else is read. `candidate` is the column `entry_point`. Raises ValueError for other statements.
    """
    if str(row.get("test_setup_code") or "").strip():
        raise ValueError("assert statements with test_setup_code are not read; write such tests as function, args and result")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests are no assert statements in Python, {source[:80]!r}: {error}") from error
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    asserts = [*body, *(statement for node in checks for statement in node.body)]
    return [_of_assert(node, row) for node in asserts if node not in checks and not _says_nothing(node)]


def _says_nothing(node: ast.stmt) -> bool:
    """A text, an assertion of True, HumanEval's METADATA, or the call of `check`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith("check(")
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and node.test.value is True
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "METADATA"


def _of_assert(node: ast.stmt, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if not isinstance(node, ast.Assert):
            raise ValueError
        said, made, expected, compared = node.test, node.test, True, False
        if isinstance(said, ast.UnaryOp) and isinstance(said.op, ast.Not):
            made, expected = said.operand, False
        elif isinstance(said, ast.Compare) and len(said.ops) == 1 and isinstance(said.ops[0], ast.Eq | ast.Is):
            made, expected, compared = said.left, ast.literal_eval(said.comparators[0]), True
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name) or made.keywords:
            raise ValueError
        function = row["entry_point"] if made.func.id == "candidate" else made.func.id
        given = _literals(ast.unparse(ast.List(made.args, ast.Load())))
        return {"function": function, "args": given, "result": json.loads(json.dumps(expected, allow_nan=False)),
                **({} if compared else {"truth": True})}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"the test {ast.unparse(node)[:120]!r} is not read; an assert statement calls a function (or "
                         "candidate, which the column entry_point names) with literals and compares the value with one by "
                         "==, as in assert f([1, 2]) == 3") from None


def _literals(given: str) -> str:
    """The text of a list of Python literals; ValueError unless it is one."""
    try:
        if isinstance(ast.literal_eval(given), list):
            return given
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    raise ValueError(f"args={given[:80]!r} is no list of Python literals; give a list of JSON values, or such a text")

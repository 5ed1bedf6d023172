"""The tools calculator, which is exact, and python, whose programs run in the sandbox."""
import os
from fractions import Fraction

import pytest
from spoken import linux

from jaxrl_llm import environments, sandbox
from jaxrl_llm.environments import python_tool, tools
from jaxrl_llm.environments.calculator import calculator, value, written
from jaxrl_llm.environments.tools import Call


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

"""Completions with programs, and who judges them wrongly: the reward `code`, and the rules of LiveCodeBench's grader.

What is right is what the exercise asks for, judged by hand: two spellings of one number are the same output, a program may use
what its data's harness imports, and a block of any Python mark is a program.
"""
import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from jaxrl_llm import rewards, sandbox
from jaxrl_llm.audits.cases import Case
from jaxrl_llm.rewards.program_tests import read
from jaxrl_llm.tasks.base import Problem

_LIMITS = sandbox.ResourceLimits(seconds=10.0, memory_mb=512)
_ECHO = "import sys\nsys.stdout.write(sys.stdin.read())"


def _block(program: str) -> str:
    return f"So:\n```python\n{program}\n```\n"


def _prints(printed: str, expected: str, right: bool) -> Case:
    """A program that prints its input, against another output."""
    return Case("outputs", _block(_ECHO), "", right, {"tests": [{"input": printed, "output": expected}]})


def _calls(body: str, given: str, expected: str, right: bool) -> Case:
    """A method `f(self, *a)` with this body, in the form of LiveCodeBench's tests of functions."""
    program = f"class Solution:\n    def f(self, *a):\n        {body}"
    return Case("functions", _block(program), "", right, {
        "tests": [{"input": given, "output": expected, "testtype": "functional"}], "metadata": '{"func_name": "f"}'})


def _runs(program: str, given: str, expected: str, right: bool) -> Case:
    return Case("surroundings", _block(program), "", right, {"tests": [{"input": given, "output": expected}]})


def _fenced(completion: str, right: bool) -> Case:
    """A completion whose program is to print 3."""
    return Case("fences", completion, "", right, {"tests": [{"input": "", "output": "3"}]})


PROGRAM_CASES: tuple[Case, ...] = (
    _prints("YES\n0.50", "YES\n0.5", True),
    _prints("YES\n0.51", "YES\n0.5", False),
    _prints("1.9999999999", "2.000000", True),
    _prints("1.99", "2.000000", False),
    _prints("1e-12", "0.000000", True),
    _prints("0.01", "0.000000", False),
    _prints("a  b", "a b", True),
    _prints("a b c", "a b", False),
    _prints("3.0", "3", True),
    _prints("2.9999999999", "3", False),
    _prints("1000000000000000001", "1000000000000000000", False),
    _prints("Case #1: 0.3333333333", "Case #1: 0.3333333334", True),
    _prints("Case #2: 0.3333333333", "Case #1: 0.3333333334", False),
    _prints("1 2\n3\n", "1 2 \n3", True),
    _prints("1\n2", "1 2", False),
    _prints("yes", "YES", False),
    _prints("-0", "0", True),
    _prints("0", "-1", False),
    _prints("1_000", "1000", False),
    _prints("", "0", False),
    _calls("return sum(a[0]) + a[1]", "[1, 2]\n3", "6", True),
    _calls("return sum(a[0])", "[1, 2]\n3", "6", False),
    _calls("return a[0] + a[1]", '"x"\n"y"', '"xy"', True),
    _calls("return tuple(a)", "1\n2", "[1, 2]", True),
    _calls("return [a[1], a[0]]", "1\n2", "[1, 2]", False),
    _calls("return a[0] / 3", "1", "0.3333333333", True),
    _calls("return 0.34", "1", "0.3333333333", False),
    _calls("return not a[0]", "false", "true", True),
    _calls("return 'true'", "false", "true", False),
    _calls("return None", "1", "null", True),
    _calls("return {'n': len(a[0])}", "[4, 5, 6]", '{"n": 3}', True),
    _calls("b: List[int] = sorted(a[0]); return b[bisect.bisect(b, 1)]", "[3, 1, 2]", "2", True),
    _runs("n: Optional[int] = int(input())\nprint(gcd(n, 12))", "18", "6", True),
    _runs("print(math.gcd(int(input()), 12), Counter('aab').most_common(1)[0][0])", "18", "6 a", True),
    _runs("print(gdc(int(input()), 12))", "18", "6", False),
    _runs("print(10**5000 % 7, len(str(10**5000)))", "", "2 5001", True),
    _runs("print(sum(map(int, open('/dev/stdin').read().split())))", "1 2 3", "6", True),
    _runs("print(sum(map(int, open(0).read().split())))", "1 2 3", "6", True),
    _runs("def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "", "20000", True),
    _runs("if __name__ == '__main__':\n    print(int(input()) + 1)", "1", "2", True),
    _runs("print(2)\nraise SystemExit(1)", "", "2", False),
    _runs("print(pow(2, 10, 1000))", "", "24", True),
    _fenced('```python\ns = "```"\nprint(len(s))\n```', True),
    _fenced("```py\nprint(3)\n```", True),
    _fenced("```python3\nprint(3)\n```", True),
    _fenced("```Python\nprint(3)\n```", True),
    _fenced("```\nprint(3)\n```", True),
    _fenced("```python\nprint(3)\n```\nIt prints\n```\n4\n```", True),
    _fenced("```python\nprint(4)\n```\nbetter:\n```python\nprint(3)\n```", True),
    _fenced("```python\nprint(3)\n```\nno:\n```python\nprint(4)\n```", False),
    _fenced("1. So:\n   ```python\n   print(3)\n   ```", True),
    _fenced("```python\nprint(3)", False),
    _fenced("print(3)", False),
    _fenced("```cpp\nprint(3)\n```", False),
)


def by_code(cases: Sequence[Case]) -> list[bool]:
    """Whether the reward `code` accepts each case."""
    problems = [Problem("", case.answer, number, extra=case.extra) for number, case in enumerate(cases)]
    combined = rewards.combine([rewards.make("code", deadline=_LIMITS.seconds, memory_mb=_LIMITS.memory_mb)])
    return [score == 1 for score in combined([case.completion for case in cases], [""] * len(cases), problems).total]


def by_live_code_bench(cases: Sequence[Case]) -> list[bool]:
    """Whether the rules of LiveCodeBench accept each case, restated; its programs run in the same sandbox."""
    return [all(_passes(between_fences(case.completion), test) for test in read(case.extra["tests"], case.extra))
            for case in cases]


def between_fences(completion: str) -> str:
    """The lines between the last two that hold three backticks, "" if there are fewer."""
    lines = completion.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1:fences[-1]]) if len(fences) >= 2 else ""


def _passes(program: str, test: dict) -> bool:
    finished = sandbox.run(program, stdin=test.get("input", ""), function=test.get("function"), args=test.get("args", []),
                           limits=_LIMITS, mode=sandbox.best().mode, harness=True)
    if finished.status != "done" or finished.code != 0:
        return False
    if "function" in test:
        return json.loads(finished.value) == test["result"]
    return same_lines(finished.stdout.decode(), test["output"])


def same_lines(printed: str, expected: str) -> bool:
    """Equally many lines, each equal as text without white space at its ends, or as a list of equal decimals."""
    left, right = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(left) == len(right) and all(a == b or None is not _decimals(a) == _decimals(b) for a, b in zip(left, right))


def _decimals(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(token) for token in line.split()]
    except InvalidOperation:
        return None


PROGRAM_JUDGES = {"code": by_code, "LiveCodeBench's rules": by_live_code_bench}

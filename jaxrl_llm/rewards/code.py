"""Programs scored by tests: each test is one program in a sandbox; its output is compared outside, with unseen answers."""
import functools
import json
import math
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm import sandbox
from jaxrl_llm.rewards.base import BatchOutput, RewardError
from jaxrl_llm.rewards.pool import cores

PASS, WRONG, HARNESS, RUNTIME, TIMEOUT, COMPILE, LATE = 1, 0, -1, -2, -3, -4, -5
_FAILURES = {RUNTIME: "runtime", TIMEOUT: "timeout", COMPILE: "compile", LATE: "late"}
_ANSWER_DEADLINES = 4  # all tests of one answer may take this many times the deadline of one
_OPEN, _CLOSE = re.compile(r"```python[ \t]*\n"), "```"
# No two neighbours of a pattern match the same digits: output of any length is read in linear time.
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)")


def extract_program(completion: str) -> str | None:
    """The last closed ```python block, or None."""
    program, position = None, 0
    while opened := _OPEN.search(completion, position):
        end = completion.find(_CLOSE, opened.end())
        if end < 0:
            break
        program, position = completion[opened.end():end].removesuffix("\n"), end + len(_CLOSE)
    return program


def same_output(printed: str, expected: str) -> bool:
    """Equal lines, white space at their ends aside; or, line by line, equally many tokens, each pair equal as numbers.

    Where an integer is expected, exactly that integer; elsewhere within 1e-5 relative.
    """
    left, right = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    if left == right:
        return True
    pairs = [(a.split(), b.split()) for a, b in zip(left, right)]
    if len(left) != len(right) or any(len(a) != len(b) for a, b in pairs):
        return False
    return all(_same_number(x, y) for a, b in pairs for x, y in zip(a, b))


def _same_number(printed: str, expected: str) -> bool:
    if expected_integer := _INTEGER.fullmatch(expected):
        printed_integer = _INTEGER.fullmatch(printed)
        return printed_integer is not None and _canonical(*printed_integer.groups()) == _canonical(*expected_integer.groups())
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    return math.isclose(float(printed), float(expected), rel_tol=1e-5)


def _canonical(sign: str, digits: str) -> str:
    digits = digits.lstrip("0")
    return ("-" if sign == "-" and digits else "") + digits


def same_value(value: Any, expected: Any) -> bool:
    """Equal JSON values of equal kinds; integers exactly, where a float is expected within 1e-5 relative."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and value.keys() == expected.keys() and all(
            same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            return number and math.isclose(value, expected, rel_tol=1e-5)
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(value, float):
        return isinstance(expected, int) and not isinstance(expected, bool) and value == expected
    return type(value) is type(expected) and value == expected


def well_formed(tests: Any) -> bool:
    """Whether these are tests as `run_test` takes them, at least one of which a program without output does not pass."""
    def is_test(test: Any) -> bool:
        if not isinstance(test, dict):
            return False
        if test.get("function"):
            return isinstance(test["function"], str) and isinstance(test.get("args") or [], list) and "result" in test
        return isinstance(test.get("input") or "", str) and isinstance(test.get("output"), str)

    return isinstance(tests, list | tuple) and all(map(is_test, tests)) and any(
        test.get("function") or test["output"].strip() for test in tests)


def run_test(program: str, test: dict, limits: sandbox.Limits, mode: str, *, until: float = math.inf,
             stop: int | None = None) -> int:
    """Outcome of one test: 1 pass, 0 wrong, -2 the program failed, -3 too late, -4 no Python, -5 not before `until`.

    `test` has `input` and `output` (standard streams), or `function`, `args` and `result` (JSON values; with `wrapped` the
    value of a list of one `result` also counts). Raises SandboxError if the sandbox fails, which is not a verdict.
    """
    finished = sandbox.run(program, stdin=test.get("input") or "", function=test.get("function"), args=test.get("args") or [],
                           limits=limits, mode=mode, ends_at=until, stop=stop)
    if finished.status == "timeout":
        return LATE if time.monotonic() >= until else TIMEOUT
    if finished.status == "compile" or finished.status == "output" or finished.code != 0:
        return COMPILE if finished.status == "compile" else RUNTIME
    try:
        if test.get("function"):
            value, expected = json.loads(finished.value), test["result"]
            passed = same_value(value, expected) or bool(test.get("wrapped")) and same_value([value], expected)
        else:
            passed = same_output(finished.stdout.decode(), test["output"])
    except (ValueError, RecursionError):  # nothing written, or no text
        return WRONG
    return PASS if passed else WRONG


class Code:
    """Batch reward: 1 when a completion's program passes every test of `problem.extra["tests"]`, else partial credit.

    `partial_credit` times the share of passed tests (below 1, so that it never reaches full credit); with 0 the tests
    stop at the first failure, otherwise at the first time-out. Completions without a program score 0 and are counted, as are
    programs that fail, time out or do not compile. A sandbox that fails is an error, never a verdict.
    `workers` programs run at a time (None: one for each core). Programs run only if every barrier of `jaxrl_llm.sandbox`
    holds, unless `unsafe`.
    """

    def __init__(self, workers: int | None, deadline: float, memory_mb: int, partial_credit: float, unsafe: bool):
        workers = cores() if workers is None else workers
        if workers < 1 or not deadline > 0 or not 0 <= partial_credit < 1:
            raise ValueError(f"workers={workers}, deadline={deadline}, partial_credit={partial_credit}; need at least "
                             "one worker, a positive deadline and a partial credit in [0, 1)")
        self.workers, self.partial_credit, self.unsafe = workers, partial_credit, unsafe
        self.limits = sandbox.Limits(seconds=deadline, memory_mb=memory_mb)

    def prepare(self) -> str:
        """The sandbox of programs on this machine. Raises RewardError if a barrier is missing and `unsafe` is not set."""
        try:
            probe = sandbox.require(self.unsafe)
        except sandbox.SandboxError as error:
            raise RewardError(f"reward 'code': {error}") from error
        return f"sandbox {probe}"

    def __call__(self, completions, answers, problems, until: float | None = None, fail_fast: bool = False) -> BatchOutput:
        self.prepare()
        stop, ends = os.pipe()
        threads = ThreadPoolExecutor(min(self.workers, max(len(completions), 1)), "program")
        outcomes_of = functools.partial(self._outcomes, until=math.inf if until is None else until, stop=stop)
        rows: list[list[int] | Exception | None] = []
        try:
            for outcomes in threads.map(outcomes_of, completions, problems):
                rows.append(outcomes)
                if fail_fast and isinstance(outcomes, Exception):
                    break
        finally:
            os.close(ends)  # ends running programs when the batch is given up
            threads.shutdown(cancel_futures=True)
            os.close(stop)
        return self._scored(rows, len(completions))

    def _scored(self, rows: list[list[int] | Exception | None], count: int) -> BatchOutput:
        scores, counts, errors = np.zeros(count), Counter(), {}
        for row, outcomes in enumerate(rows):
            if isinstance(outcomes, Exception):
                scores[row], errors[row] = np.nan, outcomes
            elif outcomes is None:
                counts["no_program"] += 1
            else:
                share = outcomes.count(PASS) / len(outcomes)
                scores[row] = 1.0 if share == 1 else self.partial_credit * share
                counts.update({_FAILURES[outcome] for outcome in outcomes if outcome in _FAILURES})
        return BatchOutput(scores, dict(counts), errors)

    def _outcomes(self, completion: str, problem, until: float, stop: int) -> list[int] | Exception | None:
        """One outcome for each test, those that are not run included; None without a program."""
        tests = None if problem is None else problem.extra.get("tests")
        if not well_formed(tests):
            return ValueError("the code reward needs problem.extra['tests'], a list of objects with input and output, which "
                              "are texts and not all blank, or with function, args and result, got " + str(tests)[:200])
        program = extract_program(completion)
        if program is None:
            return None
        outcomes: list[int] = []
        own_end = time.monotonic() + _ANSWER_DEADLINES * self.limits.seconds
        for test in tests:
            try:
                outcomes.append(run_test(program, test, self.limits, sandbox.best().mode, until=min(until, own_end), stop=stop))
            except sandbox.SandboxError as error:
                return ChildProcessError(str(error))
            except (ValueError, TypeError, AttributeError) as error:  # a test that cannot be sent
                return error
            if outcomes[-1] == LATE and until > own_end:
                outcomes[-1] = TIMEOUT
            if outcomes[-1] in (TIMEOUT, LATE) or (outcomes[-1] != PASS and self.partial_credit == 0):
                break
        return outcomes + [WRONG] * (len(tests) - len(outcomes))

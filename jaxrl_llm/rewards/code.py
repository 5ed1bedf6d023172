"""Programs scored by tests: each test is one limited, killable process that never sees the expected output."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.base import BatchOutput

PASS, WRONG, HARNESS, RUNTIME, TIMEOUT, COMPILE = 1, 0, -1, -2, -3, -4
_FAILURES = {RUNTIME: "runtime", TIMEOUT: "timeout", COMPILE: "compile"}
_FENCE = re.compile(r"```python[ \t]*\n(.*?)\n?```", re.DOTALL)


def extract_program(completion: str) -> str | None:
    """The last closed ```python block, or None."""
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else None


def same_output(printed: str, expected: str) -> bool:
    """Equal lines, white space at their ends aside; or, line by line, as many tokens, all numbers within rtol 1e-5."""
    left, right = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    if left == right:
        return True
    pairs = [(a.split(), b.split()) for a, b in zip(left, right)]
    if len(left) != len(right) or any(len(a) != len(b) for a, b in pairs):
        return False
    try:
        return all(math.isclose(float(x), float(y), rel_tol=1e-5) for a, b in pairs for x, y in zip(a, b))
    except ValueError:
        return False


def same_value(value: Any, expected: Any) -> bool:
    """Equal JSON values of equal kinds; floats within 1e-5 relative."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (value, expected))
        return numbers and math.isclose(value, expected, rel_tol=1e-5)
    return type(value) is type(expected) and value == expected


def run_test(program: str, test: dict, deadline: float, memory_mb: int) -> int:
    """Outcome of one test: 1 pass, 0 wrong, -1 the harness failed, -2 the program failed, -3 too late, -4 no Python.

    `test` has `input` and `output` (standard streams), or `function`, `args` and `result` (JSON values).
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        job = {"program": program, "function": test.get("function"), "args": test.get("args", []),
               "seconds": math.ceil(deadline) + 1, "memory_mb": memory_mb}
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "input").write_text(test.get("input", ""))
        try:
            code = _run(folder, deadline)
        except OSError:
            return HARNESS
        if code != 0:
            return {None: TIMEOUT, sandbox.COMPILE_ERROR: COMPILE}.get(code, RUNTIME)
        try:
            if test.get("function"):
                passed = same_value(json.loads((folder / "result.json").read_text()), test["result"])
            else:
                passed = same_output((folder / "output").read_text(), test["output"])
        except (OSError, ValueError, RecursionError):  # nothing written, or no text
            return WRONG
        return PASS if passed else WRONG


def _run(folder: pathlib.Path, deadline: float) -> int | None:
    """The exit code of the program, or None after the deadline, when it and what it started are killed."""
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "HOME": str(folder)}
    with open(folder / "input") as given, open(folder / "output", "w") as printed:
        command = [sys.executable, "-I", "-B", sandbox.__file__, "job.json"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=given, stdout=printed,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # children that outlive the program too
            except ProcessLookupError:
                pass
            process.wait()


class Code:
    """Batch reward: 1 when a completion's program passes every test of `problem.extra["tests"]`, else partial credit.

    `partial_credit` times the share of passed tests (below 1, so that it never reaches full credit); with 0 the tests
    stop at the first failure. Completions without a program score 0 and are counted, as are programs that fail, are
    late or do not compile. A harness failure is an error, never a verdict.
    """

    def __init__(self, workers: int, deadline: float, memory_mb: int, partial_credit: float):
        if workers < 1 or not deadline > 0 or not 0 <= partial_credit < 1:
            raise ValueError(f"workers={workers}, deadline={deadline}, partial_credit={partial_credit}; need at least "
                             "one worker, a positive deadline and a partial credit in [0, 1)")
        self.workers, self.deadline, self.memory_mb, self.partial_credit = workers, deadline, memory_mb, partial_credit

    def __call__(self, completions, answers, problems) -> BatchOutput:
        with ThreadPoolExecutor(self.workers) as threads:
            rows = list(threads.map(self._outcomes, completions, problems))
        scores, counts, errors = np.zeros(len(rows)), Counter(), {}
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

    def _outcomes(self, completion: str, problem) -> list[int] | Exception | None:
        tests = None if problem is None else problem.extra.get("tests")
        if not tests or not all(("function" in test and "result" in test) or "output" in test for test in tests):
            return ValueError("the code reward needs problem.extra['tests'], a list of objects with input and output, "
                              f"or with function, args and result, got {tests!r}")
        program = extract_program(completion)
        if program is None:
            return None
        outcomes = []
        for test in tests:
            outcomes.append(run_test(program, test, self.deadline, self.memory_mb))
            if outcomes[-1] == HARNESS:
                return ChildProcessError("no process could be started for the program")
            if outcomes[-1] != PASS and self.partial_credit == 0:
                break
        return outcomes

"""Programs scored by tests: each test is one program in a sandbox; its output is compared outside, with unseen answers."""
import dataclasses
import heapq
import itertools
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from jaxrl_llm import sandbox
from jaxrl_llm.rewards import program_tests
from jaxrl_llm.rewards.base import BatchOutput, RewardError
from jaxrl_llm.rewards.outputs import same_output, same_value
from jaxrl_llm.rewards.pool import cores
from jaxrl_llm.rewards.programs import extract_program

PASS, WRONG, HARNESS, RUNTIME, TIMEOUT, COMPILE, LATE = 1, 0, -1, -2, -3, -4, -5
_FAILURES = {RUNTIME: "runtime", TIMEOUT: "timeout", COMPILE: "compile", LATE: "late"}
_ANSWER_DEADLINES = 4  # all tests of one answer may take this many times the deadline of one
_QUICK = 0.5  # share of a batch's time for turns of programs that may be quick; the rest is for starts and for slow ones
_SLOW = sys.maxsize
_LEAST = 0.1  # share of the deadline that a test gets before it is put off


def run_test(program: str, test: dict, limits: sandbox.ResourceLimits, mode: str, *, until: float = math.inf,
             stop: int | None = None) -> int:
    """Outcome of one test: 1 pass, 0 wrong, -2 the program failed, -3 too late, -4 no Python, -5 not before `until`.

    `test` has `input` and `output` (standard streams), or `function`, `args` and `result` (JSON values; with `wrapped` the
    value of a list of one `result` also counts, with `truth` whether the value is true is the result). Raises SandboxError if
    the sandbox fails, which is not a verdict.
    """
    finished = sandbox.run(program, stdin=test.get("input") or "", function=test.get("function"), args=test.get("args") or [],
                           limits=limits, mode=mode, ends_at=until, stop=stop, harness=True)
    if finished.status == "timeout":
        return LATE if time.monotonic() >= until else TIMEOUT
    if finished.status == "compile" or finished.status == "output" or finished.code != 0:
        return COMPILE if finished.status == "compile" else RUNTIME
    try:
        if test.get("function"):
            value, expected = json.loads(finished.value), test["result"]
            passed = (bool(value) is expected if test.get("truth") else
                      same_value(value, expected) or bool(test.get("wrapped")) and same_value([value], expected))
        else:
            passed = same_output(finished.stdout.decode(), test["output"])
    except (ValueError, RecursionError):  # nothing written, or no text
        return WRONG
    return PASS if passed else WRONG


@dataclasses.dataclass
class _Answer:
    """A program and its tests: `outcomes` of those that were run; the numbers of the others are `pending`.

    `put_off`: tests that took longer than their share of the time, at the end of `pending`. `used`: seconds of its tests.
    """

    program: str
    tests: Sequence[dict]
    pending: deque[int]
    outcomes: dict[int, int] = dataclasses.field(default_factory=dict)
    put_off: set[int] = dataclasses.field(default_factory=set)
    used: float = 0.0

    @property
    def slow(self) -> bool:
        """Whether only tests are left that have been put off."""
        return self.put_off.issuperset(self.pending)


class Code:
    """Batch reward: 1 when a completion's program passes every test of `problem.extra["tests"]`, else partial credit.

    `partial_credit` times the share of passed tests (below 1, so that it never reaches full credit); with 0 the tests
    stop at the first failure. Completions without a program score 0 and are counted, as are programs that fail, time out or
    do not compile. A sandbox that fails is an error, never a verdict.
    `workers` programs run at a time (None: one for each core). Programs take turns: one that needs more than its share of
    the time until the batch ends waits for the others, as does, with partial credit, a test that needs more than its share of
    an answer's time. Programs run only if every barrier of `jaxrl_llm.sandbox` holds, unless `unsafe`.
    """

    def __init__(self, workers: int | None, deadline: float, memory_mb: int, partial_credit: float, unsafe: bool):
        workers = cores() if workers is None else workers
        if workers < 1 or not deadline > 0 or not 0 <= partial_credit < 1:
            raise ValueError(f"workers={workers}, deadline={deadline}, partial_credit={partial_credit}; need at least "
                             "one worker, a positive deadline and a partial credit in [0, 1)")
        self.workers, self.partial_credit, self.unsafe = workers, partial_credit, unsafe
        self.limits = sandbox.ResourceLimits(seconds=deadline, memory_mb=memory_mb)

    def prepare(self) -> str:
        """The sandbox of programs on this machine. Raises RewardError if a barrier is missing and `unsafe` is not set."""
        try:
            probe = sandbox.require(self.unsafe)
        except sandbox.SandboxError as error:
            raise RewardError(f"reward 'code': {error}") from error
        return f"sandbox {probe}"

    def __call__(self, completions, answers, problems, until: float | None = None, fail_fast: bool = False) -> BatchOutput:
        self.prepare()
        answered: dict[int, _Answer] = {}
        errors: dict[int, Exception] = {}
        for row, (completion, problem) in enumerate(zip(completions, problems)):
            try:
                tests, program = tests_of(problem), extract_program(completion)
                if program is not None:
                    answered[row] = _Answer(program, tests, deque(range(len(tests))))
            except ValueError as error:
                errors[row] = error
        if not (errors and fail_fast):
            errors |= self._serve(answered, math.inf if until is None else until, fail_fast)
        return self._scored(answered, errors, len(completions))

    def _serve(self, answered: dict[int, _Answer], until: float, fail_fast: bool) -> dict[int, Exception]:
        """Runs the tests of all answers in turns; returns the errors of those whose sandbox failed."""
        turns, errors = itertools.count(), dict[int, Exception]()
        waiting = [(0, next(turns), row) for row in answered]
        running: dict[Future, int] = {}
        stop, ends = os.pipe()
        threads = ThreadPoolExecutor(min(self.workers, max(len(waiting), 1)), "program")
        try:
            while waiting or running:
                while len(running) < self.workers and waiting:
                    quick = sum(put_off < _SLOW for put_off, _, _ in waiting)
                    share = _QUICK * (until - time.monotonic()) * self.workers / quick if quick else math.inf
                    row = heapq.heappop(waiting)[2]
                    running[threads.submit(self._turn, answered[row], share, until, stop)] = row
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    row = running.pop(future)
                    if (error := future.exception()) is not None:
                        errors[row] = _as_error(error)
                        if fail_fast:
                            return errors
                    elif future.result():
                        heapq.heappush(waiting, (self._put_off(answered[row]), next(turns), row))
            return errors
        finally:
            os.close(ends)  # ends running programs when the batch is given up
            threads.shutdown(cancel_futures=True)
            os.close(stop)

    def _put_off(self, answer: _Answer) -> int:
        """How often an answer was put off, the order of the next turns; `_SLOW` if nothing is left that may be quick."""
        slow = answer.slow or self.partial_credit == 0
        return _SLOW if answer.put_off and slow else len(answer.put_off)

    def _turn(self, answer: _Answer, share: float, until: float, stop: int) -> bool:
        """Runs tests of an answer for `share` seconds, the last of which begins in their first half; whether more is to do.

        Where the time is too short for all answers, whoever has begun goes on for up to a deadline.
        """
        begun = now = time.monotonic()
        lasts = share / 2 if share >= _LEAST * self.limits.seconds else self.limits.seconds
        while answer.pending and (now < begun + lasts or now == begun) and not (answer.slow and share < math.inf):
            test, left = answer.pending.popleft(), _ANSWER_DEADLINES * self.limits.seconds - answer.used
            seconds = self._seconds(answer, test, begun + share - now, left)
            if now >= until or left <= 0:
                outcome = LATE if now >= until else TIMEOUT
            else:
                outcome = run_test(answer.program, answer.tests[test], self.limits._replace(seconds=seconds),
                                   sandbox.best().mode, until=min(until, now + left), stop=stop)
            before, now = now, time.monotonic()
            put_off = outcome == TIMEOUT and seconds < self.limits.seconds and left > 0
            if self.partial_credit or not put_off:  # else it is run again, to its end
                answer.used += now - before
            if put_off:
                answer.put_off.add(test)
                answer.pending.append(test)
                continue
            answer.outcomes[test] = outcome = TIMEOUT if outcome == LATE and now < until else outcome
            if outcome == LATE or answer.used >= _ANSWER_DEADLINES * self.limits.seconds or (
                    outcome != PASS and self.partial_credit == 0):
                return False
        return bool(answer.pending)

    def _seconds(self, answer: _Answer, test: int, share: float, left: float) -> float:
        """The seconds that a test may run: all, or about its share of its answer's turn and, with partial credit, time."""
        if test not in answer.put_off and self.partial_credit:
            share = min(share, left / (len(answer.pending) + 1))
        return min(self.limits.seconds, max(share, _LEAST * self.limits.seconds))

    def _scored(self, answered: dict[int, _Answer], errors: dict[int, Exception], count: int) -> BatchOutput:
        scores, counts = np.zeros(count), Counter(no_program=count - len(answered.keys() | errors.keys()))
        scores[list(errors)] = np.nan
        for row in answered.keys() - errors.keys():
            answer = answered[row]
            outcomes = list(answer.outcomes.values())
            share = outcomes.count(PASS) / len(answer.tests)
            scores[row] = 1.0 if share == 1 else self.partial_credit * share
            counts.update({_FAILURES[outcome] for outcome in outcomes if outcome in _FAILURES})
        return BatchOutput(scores, dict(counts), errors)


def tests_of(problem: Any) -> list[dict[str, Any]]:
    """The tests of a problem; ValueError if it has none that can be run."""
    extra = {} if problem is None else problem.extra
    try:
        return program_tests.read(extra.get("tests"), extra)
    except ValueError as error:
        raise ValueError(f"the code reward needs problem.extra['tests']: {error}") from error


def _as_error(error: BaseException) -> Exception:
    """The error of a row: of a sandbox, or of a test that cannot be sent; raises anything else."""
    if isinstance(error, sandbox.SandboxError):
        return ChildProcessError(str(error))
    if isinstance(error, ValueError | TypeError | AttributeError):
        return error
    raise error

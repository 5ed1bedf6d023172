"""Worker processes with a deadline: a late one is killed and replaced, and the caller gets an error."""
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxrl_llm.rewards.base import RewardError
from jaxrl_llm.rewards.process import Outcome, Process, WorkerTemplate

START_LIMIT = 120.0  # seconds for a worker to import its function on a busy machine
_LATE = Outcome("late", message="the batch ended before there was a result")
_PUT_OFF = Outcome("put off")


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Up to `workers` (None: one a core) processes that call `target` ("module:function") within `deadline` seconds a call.

    Safe from any thread, one batch after the other: no signals are used in this process. Processes start at first use,
    hold at most `memory_mb` MiB (0: no limit), and end, with everything that they started, when they are late, when the pool
    is closed or when this process ends in any way. They are forked from a template that has imported the function. When a
    call runs for more than half of its time, a spare process is started for the next one. `restricted` processes cannot write
    files, start programs or open connections; `scores` ones return numbers (see `jaxrl_llm.rewards.worker`).
    """

    def __init__(self, target: str, workers: int | None = None, deadline: float = 5.0, memory_mb: int = 2048,
                 restricted: bool = False, scores: bool = False):
        self.workers, self.deadline, self._target = cores() if workers is None else workers, deadline, target
        if self.workers < 1 or not deadline > 0:
            raise ValueError(f"workers={workers}, deadline={deadline}; need at least one worker, a positive deadline")
        self._settings = (str(memory_mb), "restricted" if restricted else "free", "scores" if scores else "values")
        self._lock = threading.Lock()
        self._template: WorkerTemplate | None = None
        self._starting: list[Process] = []
        self._ready: list[Process] = []
        self._running: dict[Process, int] = {}  # and the row that it computes
        self._stopped: list[Process] = []  # to be waited for

    def map(self, calls: Sequence[tuple], until: float | None = None,
            stop: Callable[[Outcome], bool] | None = None) -> list[Outcome]:
        """The outcome of each argument tuple, in order.

        At `until` (of `time.monotonic()`) running calls are killed, and their outcomes and those of the rest are "late".
        If all calls together could take longer than that, a call that exceeds its share of the time is put off to the end, so
        that slow calls do not take the time of quick ones.
        An outcome for which `stop` is true ends the batch in the same way and closes the pool, as any exception does.
        Raises RewardError when a worker process cannot start.
        """
        outcomes = [_LATE] * len(calls)
        if not self._lock.acquire(timeout=-1 if until is None else max(until - time.monotonic(), 0)):
            return outcomes
        finished = False
        try:
            finished = self._serve(calls, outcomes, until, stop)
            if finished:
                self._stop([*self._running])
                self._start(len(calls))
            return outcomes
        finally:
            try:
                if not finished:
                    self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ends the processes once they are idle; a later call starts new ones."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._stop([*self._running, *self._ready, *self._starting])
        if self._template is not None:
            self._template.stop()
            self._template = None

    def _serve(self, calls, outcomes: list[Outcome], until: float | None, stop) -> bool:
        """Fills `outcomes`; returns whether none of them was one to stop at."""
        waiting, crashed, put_off = deque(range(len(calls))), set(), set()
        while (waiting or self._running) and (until is None or time.monotonic() < until):
            self._start(len(calls))
            for row, outcome in self._assign(waiting, calls, crashed, put_off, until) + self._collect(until):
                if outcome is _PUT_OFF:
                    put_off.add(row)
                    waiting.append(row)
                elif outcome.status == "crash" and row not in crashed:  # maybe the after-effect of an earlier call
                    crashed.add(row)
                    waiting.appendleft(row)
                else:
                    outcomes[row] = outcome
                    if stop is not None and stop(outcome):
                        return False
        return True

    def _start(self, count: int) -> None:
        """Starts processes until each of `count` calls has one, and one more for each call that is likely to be late."""
        now = time.monotonic()
        wanted = min(self.workers, count) + sum(process.end - now < process.limit / 2 for process in self._running)
        for _ in range(wanted - len(self._starting) - len(self._ready) - len(self._running)):
            try:
                if self._template is None or not self._template.alive:
                    self._template = WorkerTemplate(self._target, self._settings)
                self._starting.append(Process(self._template, START_LIMIT))
            except OSError as error:
                raise RewardError(f"no worker process for {self._target!r} could be started: {error}. Lower the workers of the "
                                  "reward, or raise the limits of this machine on processes and open files") from error

    def _assign(self, waiting: deque, calls, crashed: set[int], put_off: set[int],
                until: float | None) -> list[tuple[int, Outcome]]:
        """Gives calls to ready processes, crashed ones to new processes; returns the outcomes of calls that cannot be sent."""
        failed: list[tuple[int, Outcome]] = []
        share = self.deadline if until is None else (until - time.monotonic()) * self.workers / max(len(waiting), 1)
        while waiting and self._ready and len(self._running) < self.workers:
            process = self._ready.pop()  # the last used is the warmest
            if waiting[0] in crashed and process.used:
                process.stop()
                self._stopped.append(process)
                continue
            row = waiting.popleft()
            try:
                request = pickle.dumps(calls[row])
            except Exception as error:
                self._ready.append(process)
                failed.append((row, Outcome("error", message=f"the arguments cannot be sent to a process: {error}")))
                continue
            process.ask(request, self.deadline if row in put_off else min(self.deadline, max(share, self.deadline / 10)))
            self._running[process] = row
        return failed

    def _collect(self, until: float | None) -> list[tuple[int, Outcome]]:
        """Waits until something changes; returns the outcomes so far."""
        settled = []
        for process in self._changed(until):
            outcome = process.poll()
            if outcome is None:
                continue
            if process in self._running:
                cut_short = outcome.status == "timeout" and process.limit < self.deadline
                settled.append((self._running.pop(process), _PUT_OFF if cut_short else outcome))
            else:
                self._starting.remove(process)
                if outcome.status != "ok":
                    self._stop([process])
                    raise RewardError(
                        f"a worker process for {self._target!r} did not start: {outcome.status} {outcome.message}. Check "
                        "that the module can be imported by a new Python process, and the memory limit")
            (self._ready if process.alive else self._stopped).append(process)
        return settled

    def _changed(self, until: float | None) -> list[Process]:
        """The processes that can be read from or written to, or are late, once there is one or a spare may be needed."""
        active, poll, owners, now = [*self._running, *self._starting], select.poll(), {}, time.monotonic()
        for process in active:
            for descriptor, event in zip(process.descriptors(), (select.POLLOUT, select.POLLIN)):
                if descriptor is not None:
                    poll.register(descriptor, event)
                    owners[descriptor] = process
        if not active:
            return []
        moments = [process.end for process in active] + [process.end - process.limit / 2 for process in self._running]
        next_moment = min([moment for moment in moments if moment > now] + ([] if until is None else [until]), default=now)
        changed = {owners[descriptor] for descriptor, _ in poll.poll(max(next_moment - now, 0) * 1000 + 1)}
        return [process for process in active if process in changed or process.end <= time.monotonic()]

    def _stop(self, processes: Sequence[Process]) -> None:
        """Ends these processes and waits for all that were ended."""
        for process in processes:
            process.stop()
        for process in [*processes, *self._stopped]:
            process.wait()
        def left(all):
            return [process for process in all if process.alive]
        self._starting, self._ready, self._stopped = left(self._starting), left(self._ready), []
        self._running = {process: row for process, row in self._running.items() if process.alive}

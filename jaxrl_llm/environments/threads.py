"""Calls of a function in threads, whose outcomes are available in order of completion."""
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.pool import cores
from jaxrl_llm.rewards.process import Outcome
from jaxrl_llm.rewards.worker import describe


class Threads:
    """Calls of a function in up to `workers` threads (None: four a core), each abandoned after `deadline` seconds.

    The threads are daemons, unlike those of `concurrent.futures`, where a hanging thread keeps the program from ending.
    Calls begin in the order of submission; names of unfinished calls must differ.
    """

    def __init__(self, function: Callable[..., Any], workers: int | None, deadline: float):
        self._function, self._workers, self._deadline = function, 4 * cores() if workers is None else workers, deadline
        if self._workers < 1 or not deadline > 0:
            raise ValueError(f"workers={workers}, deadline={deadline}; need at least one worker, a positive deadline")
        self._waiting: deque[tuple[int, tuple]] = deque()
        self._ends: dict[int, tuple[float, int]] = {}  # of running calls: deadline and number of the call
        self._done: queue.SimpleQueue[tuple[int, int, Outcome]] = queue.SimpleQueue()
        self._count = 0

    def __len__(self) -> int:
        """Number of calls whose outcome was not returned yet."""
        return len(self._waiting) + len(self._ends)

    def submit(self, name: int, call: tuple) -> None:
        """Begins a call as soon as a thread is free."""
        self._waiting.append((name, call))
        self._begin()

    def ready(self, least: int) -> list[tuple[int, Outcome]]:
        """Returns (name, outcome) of calls that finished or timed out, in order of completion.

        Blocks until min(least, pending) are available.
        """
        outcomes: list[tuple[int, Outcome]] = []
        least = min(least, len(self))
        while self._ends:
            first = min(end for end, _ in self._ends.values())
            left = first - time.monotonic() if len(outcomes) < least else 0.0
            try:
                name, number, outcome = self._done.get(timeout=max(left, 0.0))
            except queue.Empty:
                late = [name for name, (end, _) in self._ends.items() if end <= time.monotonic()]
                if not late and len(outcomes) >= least:
                    break
                for name in late:
                    del self._ends[name]
                    outcomes.append((name, Outcome("timeout", message=f"no result within {self._deadline:g} s")))
            else:
                if self._ends.get(name, (0.0, -1))[1] == number:  # not an abandoned call
                    del self._ends[name]
                    outcomes.append((name, outcome))
            self._begin()
        return outcomes

    def map(self, calls: Sequence[tuple]) -> list[Outcome]:
        """The outcome of each argument tuple, in order; submitted calls run beside them."""
        batch = Threads(self._function, self._workers, self._deadline)
        for row, call in enumerate(calls):
            batch.submit(row, call)
        outcomes = dict(batch.ready(len(calls)))
        return [outcomes[row] for row in range(len(calls))]

    def close(self) -> None:
        """Drops calls that have not begun and abandons running ones."""
        self._waiting.clear()
        self._ends.clear()

    def _begin(self) -> None:
        while self._waiting and len(self._ends) < self._workers:
            name, call = self._waiting.popleft()
            self._count += 1
            self._ends[name] = time.monotonic() + self._deadline, self._count
            threading.Thread(target=self._work, args=(name, self._count, call), name="environment", daemon=True).start()

    def _work(self, name: int, number: int, call: tuple) -> None:
        try:
            self._done.put((name, number, Outcome("ok", self._function(*call))))
        except BaseException as error:  # SystemExit as well
            self._done.put((name, number, Outcome("error", message=describe(error))))

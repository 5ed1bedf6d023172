"""Sampling under several adapters on one engine: rows of one adapter at a time, adapters in the order of their requests."""
import contextlib
import dataclasses
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from jaxrl_llm.contrib.tinker.learner import AdapterLearner
from jaxrl_llm.engines.engine import Node, Request, SlotEngine
from jaxrl_llm.serving.app import joined
from jaxrl_llm.serving.worker import Closed, Failure, Worker


class AdapterSnapshot:
    """Weights of an adapter that do not change, on the host; `tree` is None for the base alone."""

    def __init__(self, tree: Any = None):
        self.tree = tree


@dataclasses.dataclass(eq=False)
class _Job:
    """A request: its rows, the results of each so far, and how many are still running."""

    snapshot: AdapterSnapshot
    requests: Sequence[Request]
    future: Future
    parts: list[list[Node]]
    left: int
    failure: Failure | None = None


class Turns:
    """Rows of several adapters. The engine's adapter has room for the largest rank; smaller ones are filled up with zeros.

    Rows of the adapter in use join the running ones, unless another adapter is already waiting. All but `sample` runs in the
    worker's thread.
    """

    def __init__(self, worker: Worker, learner: AdapterLearner, rank: int, base: AdapterSnapshot):
        """`rank`: rank of the engine's adapter, which begins as that of `base`."""
        self._worker, self._learner, self._rank, self._current = worker, learner, rank, base
        self._waiting: deque[_Job] = deque()
        self._running = 0

    def sample(self, snapshot: AdapterSnapshot, requests: Sequence[Request]) -> Future:
        """The future gives a node for each request, in order; it raises ValueError, `Failure`, or an error of the switch."""
        job = _Job(snapshot, requests, Future(), [[] for _ in requests], len(requests))

        def enter(engine):
            self._waiting.append(job)
            self._go_on(engine)

        self._worker.call(enter)
        return job.future

    def _go_on(self, engine: SlotEngine) -> None:
        """Starts the jobs at the head of the queue that may run now."""
        while self._waiting and (not self._running or self._waiting[0].snapshot is self._current):
            job = self._waiting.popleft()
            if job.snapshot is not self._current:
                try:
                    lora = self._learner.padded(job.snapshot.tree, self._rank)
                    engine.publish(engine.version + 1, self._learner.params, lora)
                except Exception as error:  # nobody reads the future of this call; the job's client waits for its own
                    job.future.set_exception(error)
                    continue
                self._current = job.snapshot
            self._running += len(job.requests)
            listeners = [partial(self._hear, job, i) for i in range(len(job.requests))]
            self._worker.submit(job.requests, listeners).add_done_callback(partial(self._submitted, job))

    def _submitted(self, job: _Job, submitted: Future) -> None:
        if (error := submitted.exception()) is not None:
            job.future.set_exception(error)
            self._ended(len(job.requests))

    def _hear(self, job: _Job, index: int, event: Node | Failure) -> None:
        if isinstance(event, Failure):
            job.failure = event
        else:
            job.parts[index].append(event)
            if event.finish == "running":
                return
        job.left -= 1
        if not job.left:
            if job.failure is None:
                job.future.set_result([joined(nodes) for nodes in job.parts])
            else:
                job.future.set_exception(job.failure)
        self._ended(1)

    def _ended(self, count: int) -> None:
        self._running -= count
        if not self._running:
            with contextlib.suppress(Closed):
                self._worker.call(self._go_on)

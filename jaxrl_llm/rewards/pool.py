"""Worker processes with a deadline: one that is late is killed and replaced, and the caller is told."""

import json
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.rewards.base import RewardError

START_LIMIT = 120.0  # seconds for a worker to import its function on a busy machine


class Outcome(NamedTuple):
    """`value` when `status` is "ok"; otherwise "error", "timeout" or "crash" with `message` saying more."""

    status: str
    value: Any = None
    message: str = ""


class WorkerPool:
    """`workers` processes that each call `target` ("module:function", importable) within `deadline` seconds a call.

    Safe from any thread and from several at once: no signals are used in this process. Processes start at first use,
    hold at most `memory_mb` MiB (0: no limit), and end when the pool is closed or this process ends. `restricted` ones
    cannot write files, start programs or open connections (see `jaxrl_llm.rewards.worker`).
    """

    def __init__(self, target: str, workers: int = 2, deadline: float = 5.0, memory_mb: int = 2048,
                 restricted: bool = False):
        if workers < 1 or not deadline > 0:
            raise ValueError(f"workers={workers}, deadline={deadline}; need at least one worker, a positive deadline")
        self.workers, self.deadline = workers, deadline
        self._start = (target, str(deadline), str(memory_mb), "restricted" if restricted else "free")
        self._idle: queue.LifoQueue = queue.LifoQueue()  # the last used is the warmest; None: not started
        for _ in range(workers):
            self._idle.put(None)

    def map(self, calls: Sequence[tuple]) -> list[Outcome]:
        """The outcome of each argument tuple, in order."""
        if not calls:
            return []
        with ThreadPoolExecutor(min(self.workers, len(calls))) as threads:
            return list(threads.map(self._call, calls))

    def close(self) -> None:
        """End the processes once they are idle; a later call starts new ones."""
        for process in [self._idle.get() for _ in range(self.workers)]:
            if process is not None:
                process.kill()
            self._idle.put(None)

    def _call(self, arguments: tuple) -> Outcome:
        try:
            request = pickle.dumps(arguments)
        except Exception as error:
            return Outcome("error", message=f"the arguments cannot be sent to a process: {error}")
        process = self._idle.get()
        try:
            for _ in range(2):  # a crash may be the after-effect of an earlier call: tried again on a new process
                process = process or _Process(*self._start)
                outcome = process.ask(request, self.deadline)
                if outcome.status in ("timeout", "crash"):
                    process = process.kill()
                if outcome.status != "crash":
                    break
            return outcome
        finally:
            self._idle.put(process)


class _Process:
    """One worker in a process group of its own, and the pipes to it."""

    def __init__(self, target: str, *settings: str):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "jaxrl_llm.rewards.worker", target, *settings]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        started = self._receive(START_LIMIT)
        if started.status != "ok":
            self.kill()
            raise RewardError(f"a worker process for {target!r} did not start: {started.status} {started.message}. "
                              "Check that the module can be imported by a new Python process, and the memory limit")

    def ask(self, request: bytes, deadline: float) -> Outcome:
        try:
            self._process.stdin.write(len(request).to_bytes(4, "big") + request)
            self._process.stdin.flush()
        except OSError:
            return Outcome("crash", message="the worker process was gone before the call")
        return self._receive(deadline)

    def _receive(self, limit: float) -> Outcome:
        reply, end = b"", time.monotonic() + limit
        while not reply.endswith(b"\n"):
            if not self._selector.select(max(end - time.monotonic(), 0)):
                return Outcome("timeout", message=f"no result within {limit:g} s; the process was killed")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return Outcome("crash", message=f"the worker process ended with code {self._process.wait()}")
            reply += part
        record = json.loads(reply)
        if "error" in record:
            return Outcome("error", message=record["error"])
        return Outcome("ok", record["value"])

    def kill(self) -> None:
        """End the process and all it started, and close its pipes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:  # unsent bytes for a process that is gone
                pass

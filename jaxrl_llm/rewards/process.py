"""One worker process, asked without ever waiting for it."""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import IO, Any, NamedTuple

REPLY_LIMIT = 1 << 20  # bytes
END_LIMIT = 15.0  # seconds for a supervisor to end its processes
_SUPERVISOR = str(pathlib.Path(__file__).with_name("supervisor.py"))


class Outcome(NamedTuple):
    """`value` when `status` is "ok"; otherwise "error", "timeout", "crash" or "late" with `message` saying more."""

    status: str
    value: Any = None
    message: str = ""


class Process:
    """A worker (see `jaxrl_llm.rewards.worker`) under its supervisor, and the pipes to both.

    `ask` sends a request, `poll` gives its outcome once it is there; neither waits. A process that is late, has ended or
    talks nonsense is ended, with all that it started, and `alive` is False from then on.
    """

    def __init__(self, target: str, settings: tuple[str, ...], limit: float):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        control, ours = os.pipe()
        command = [sys.executable, "-I", "-S", _SUPERVISOR, str(control), str(os.getpid()),
                   sys.executable, "-m", "jaxrl_llm.rewards.worker", target, *settings]
        try:
            self._supervisor = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env=environment, pass_fds=(control,), start_new_session=True)
        finally:
            os.close(control)
            self._pipes: list[IO[bytes]] = [open(ours, "wb", buffering=0)]  # closed with this object
        self._pipes += [self._supervisor.stdin, self._supervisor.stdout]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self.alive, self.limit, self.end = True, limit, time.monotonic() + limit
        self._number, self._unsent, self._reply = 0, memoryview(b""), bytearray()

    def ask(self, request: bytes, limit: float) -> None:
        """Send the next request, to be answered within `limit` seconds."""
        self._number += 1
        self._unsent = memoryview(len(request).to_bytes(8, "big") + self._number.to_bytes(8, "big") + request)
        self.limit, self.end = limit, time.monotonic() + limit

    @property
    def used(self) -> bool:
        """Whether it has been asked before."""
        return self._number > 0

    def descriptors(self) -> tuple[int | None, int]:
        """The pipe to write to, None when all is sent, and the one to read from."""
        return self._supervisor.stdin.fileno() if self._unsent else None, self._supervisor.stdout.fileno()

    def poll(self) -> Outcome | None:
        """The outcome of the request, or None when it is not there yet."""
        try:
            if self._unsent:
                self._unsent = self._unsent[os.write(self._supervisor.stdin.fileno(), self._unsent):]
        except BlockingIOError:
            pass
        except OSError:
            return self._crash()
        try:
            while part := os.read(self._supervisor.stdout.fileno(), 1 << 16):
                self._reply += part
                if b"\n" in part or len(self._reply) > REPLY_LIMIT:
                    return self._read()
            return self._crash()
        except BlockingIOError:
            if time.monotonic() < self.end:
                return None
        self.stop()
        return Outcome("timeout", message=f"no result within {self.limit:g} s; the process was killed")

    def stop(self) -> None:
        """Have the process and all that it started ended. Does not wait for it, `wait` does."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()

    def wait(self) -> int:
        """The exit code, after `stop`."""
        try:
            return self._supervisor.wait(END_LIMIT)
        except subprocess.TimeoutExpired:  # its worker goes with it
            self._supervisor.kill()
            return self._supervisor.wait()

    def _crash(self) -> Outcome:
        self.stop()
        return Outcome("crash", message=f"the worker process ended with code {self.wait()}")

    def _read(self) -> Outcome:
        """The outcome that the reply states. What is no reply to the last request may come from an earlier one."""
        if len(self._reply) > REPLY_LIMIT:
            self.stop()
            return Outcome("error", message=f"the reply has more than {REPLY_LIMIT} bytes; the worker process was killed")
        try:
            record = json.loads(self._reply)
        except (ValueError, RecursionError):
            record = None
        self._reply.clear()
        if not isinstance(record, dict) or record.get("number") != self._number or not record.keys() & {"value", "error"}:
            self.stop()
            return Outcome("crash", message="the worker process wrote something that is no reply; it was killed")
        return Outcome("ok", record["value"]) if "value" in record else Outcome("error", message=str(record["error"]))

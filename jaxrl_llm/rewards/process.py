"""One worker process, used without ever waiting for it."""
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

REPLY_LIMIT = 1 << 20  # bytes
END_LIMIT = 15.0  # seconds for a keeper to end its processes
CLOSE_LIMIT = 1.0  # seconds for it to end itself after its last message


class Outcome(NamedTuple):
    """`value` when `status` is "ok"; otherwise "error", "timeout", "crash" or "late" with `message` saying more."""

    status: str
    value: Any = None
    message: str = ""


class WorkerTemplate:
    """The process that workers of one function are copied from, see `jaxrl_llm.rewards.template`."""

    def __init__(self, target: str, settings: tuple[str, ...]):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "jaxrl_llm.rewards.template", str(theirs.fileno()), str(os.getpid()), target]
            self._process = subprocess.Popen([*command, *settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(),),
                                             start_new_session=True)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, descriptors: list[int]) -> None:
        """Starts a worker that uses these descriptors: requests, replies and the control of its keeper."""
        socket.send_fds(self._socket, [b"+"], descriptors)

    def stop(self) -> None:
        """Ends the process, whose workers must have been stopped before."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Process:
    """A worker (see `jaxrl_llm.rewards.worker`) with its keeper, and the pipes to both.

    `ask` sends a request, `poll` returns its outcome once it is there; neither waits. A process that is late, has exited or
    sends malformed replies is killed, with everything that it started, and `alive` is False from then on.
    """

    def __init__(self, template: WorkerTemplate, limit: float):
        requests, self._requests = _pipe(writing=True)
        replies, self._replies = _pipe(writing=False)
        self._control, control = socket.socketpair()
        try:
            template.start([requests, replies, control.fileno()])
        finally:
            os.close(requests)
            os.close(replies)
            control.close()
        self.alive, self.limit, self.end = True, limit, time.monotonic() + limit
        self._number, self._unsent, self._reply = 0, memoryview(b""), bytearray()
        self._code: str | None = None

    def ask(self, request: bytes, limit: float) -> None:
        """Sends the next request, to be answered within `limit` seconds."""
        self._number += 1
        self._unsent = memoryview(len(request).to_bytes(8, "big") + self._number.to_bytes(8, "big") + request)
        self.limit, self.end = limit, time.monotonic() + limit

    @property
    def used(self) -> bool:
        """Whether it has been asked before."""
        return self._number > 0

    def descriptors(self) -> tuple[int | None, int]:
        """The pipe to write to, None when all is sent, and the one to read from."""
        return self._requests.fileno() if self._unsent else None, self._replies.fileno()

    def poll(self) -> Outcome | None:
        """The outcome of the request, or None when it is not there yet."""
        try:
            if self._unsent:
                self._unsent = self._unsent[os.write(self._requests.fileno(), self._unsent):]
        except BlockingIOError:
            pass
        except OSError:
            return self._crash()
        try:
            while part := os.read(self._replies.fileno(), 1 << 16):
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
        """Ends the process and everything that it started. Does not wait for it; `wait` does."""
        self.alive = False
        self._requests.close()
        self._replies.close()
        try:
            self._control.shutdown(socket.SHUT_WR)
        except OSError:  # the keeper has ended
            pass

    def wait(self) -> str:
        """Waits, after `stop`, until all has ended; the exit code, "?" when no process is left to report it."""
        if self._code is None:
            self._control.settimeout(END_LIMIT)
            try:
                self._code = self._control.recv(16).decode() or "?"
                self._control.settimeout(CLOSE_LIMIT)
                self._control.recv(1)  # nothing: the kernel closes the socket when the keeper itself has gone
            except OSError:
                self._code = self._code or "?"
            self._control.close()
        return self._code

    def _crash(self) -> Outcome:
        self.stop()
        return Outcome("crash", message=f"the worker process ended with code {self.wait()}")

    def _read(self) -> Outcome:
        """The outcome in the reply. A line that does not reply to the last request may come from an earlier one."""
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


def _pipe(writing: bool):
    """A pipe: the descriptor of the worker's end, and ours, which does not wait, as a file that closes itself."""
    reader, writer = os.pipe()
    theirs, ours = (reader, writer) if writing else (writer, reader)
    os.set_blocking(ours, False)
    return theirs, open(ours, "wb" if writing else "rb", buffering=0)

"""A separate process for chat templates, which are untrusted and could run forever or fill the memory."""
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any

CPU_SECONDS = 5.0  # of processor time for one conversation; a real one takes some 20 microseconds
WALL_SECONDS = 120.0  # to start, or to answer on a machine that is too busy to give the processor time
MEMORY_MB = 1024
OUTPUT_LIMIT = 1 << 24  # characters of a rendered conversation
TEXT, ERROR = b"t", b"e"  # kinds of replies
MARKS = ("generation_begins", "generation_ends")  # variables that a template's {% generation %} parts are enclosed in


class Renderer:
    """Renders templates in one process, which starts at first use, is killed when it exceeds a limit, and ends with this one.

    Limits inside jinja's sandbox would be guesses: `'a' * 10**10`, a format of that width and a large constant in the
    source are single calls into C code, which nothing in the same interpreter can interrupt. Limits of the kernel hold for
    all of them. A round trip through the pipes costs some 50 microseconds. The limit of time is one of processor time:
    a busy machine does not make a good template fail. Safe from any thread.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory_mb: int = MEMORY_MB):
        self._cpu_seconds, self._memory_mb = cpu_seconds, memory_mb
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text of `template` with `variables`, which are made of the types of JSON.

        Raises ValueError with the reason why the template failed, and its line if known.
        """
        request = marshal.dumps((template, variables))
        with self._lock:
            try:
                reply = self._ask(request)
                if reply is None:  # it may have been killed since the last request: a fresh process decides
                    reply = self._ask(request)
            except BaseException:  # a reply still in the pipe would be taken for the next one
                self._end()
                raise
        if reply is None:
            raise ValueError("the process that renders it crashed, and so did a new one")
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] != TEXT:
            raise ValueError(text)
        return text

    def close(self) -> None:
        """Ends the process; a later call starts a new one."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> bytes | None:
        """The reply of the process; None where it ended without one. Raises ValueError at a limit of time."""
        process = self._process = self._process or self._start()
        try:
            unsent = memoryview(len(request).to_bytes(8, "big") + request)
            while unsent:
                unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
            return _reply(process.stdout.fileno())
        except TimeoutError:
            raise ValueError(f"no text within {WALL_SECONDS:g} s") from None
        except (BrokenPipeError, EOFError):
            if self._end() == -signal.SIGPROF:
                raise ValueError(f"more than {self._cpu_seconds:g} s of processor time are needed") from None
            return None

    def _start(self) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-m", "jaxrl_llm.tokenizers.template_worker", str(self._cpu_seconds), str(self._memory_mb)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                   bufsize=0, env=environment, start_new_session=True)
        try:
            _reply(process.stdout.fileno())
        except (EOFError, TimeoutError) as error:
            process.kill()
            raise RuntimeError(
                f"the process for chat templates did not start (exit code {process.wait()}); `{' '.join(command)}` shows why"
            ) from error
        return process

    def _end(self) -> int | None:
        """Ends the process, if there is one; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            pipe.close()
        try:
            return process.wait(0.1)  # it is ending by itself, and then its exit code says why
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _reply(pipe: int) -> bytes:
    """The next reply. Raises EOFError if the process ends before, TimeoutError if it is late."""
    poll, end, content, length = select.poll(), time.monotonic() + WALL_SECONDS, bytearray(), None
    poll.register(pipe, select.POLLIN)
    while length is None or len(content) < 8 + length:
        if not poll.poll(max(end - time.monotonic(), 0) * 1000):
            raise TimeoutError
        part = os.read(pipe, 1 << 16)
        content += part
        if len(content) >= 8:
            length = int.from_bytes(content[:8], "big")
        if not part or len(content) > 5 * OUTPUT_LIMIT:  # a character has at most 4 bytes
            raise EOFError
    return bytes(content[8:])


@lru_cache(maxsize=1)
def shared(pid: int) -> Renderer:
    """The renderer of the process `pid`; one that was forked must not share the pipes of its parent."""
    return Renderer()

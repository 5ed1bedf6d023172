"""One program in a sandbox: started, fed, read within bounds, and killed together with everything that it started."""
import contextlib
import ctypes
import fcntl
import functools
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.sandbox import inside, modes, syscalls
from jaxrl_llm.sandbox.children import children
from jaxrl_llm.sandbox.modes import ResourceLimits

_START_LIMIT = 30.0  # seconds until the program starts, on a busy machine
_END_LIMIT = 30.0  # seconds until a namespace of many busy processes is gone
_PR_SET_DUMPABLE = 4
_READY = b"ready\n"


class SandboxError(RuntimeError):
    """The sandbox could not be set up; nothing of the program has run."""


class ProgramResult(NamedTuple):
    """How a program ended.

    `status`: "done" (it ended by itself, with exit `code`; above 128: by signal `code - 128`), "timeout", "output" (it wrote
    more than its limit), "compile" (not valid Python). `stdout`, `stderr` and `value` (the JSON of the function's value, ""
    without one) are what it wrote, at most `limits.output_bytes` each.
    """

    status: str
    code: int
    stdout: bytes
    stderr: bytes
    value: bytes


def run(program: str, *, stdin: str = "", function: str | None = None, args: Sequence | str = (),
        limits: ResourceLimits = ResourceLimits(), mode: str, ends_at: float = math.inf, stop: int | None = None,
        harness: bool = False) -> ProgramResult:
    """Runs Python text in a sandbox of that `mode`; with a `function`, calls it with the `args`.

    These are JSON values, or the text of a list of Python literals. Where the program has no such function, it is a method of
    its class `Solution`, made without arguments. With `harness` names that it lacks are those of the usual modules, integers of
    any length have a text, and `/dev/stdin` can be opened.

    The program sees an interpreter, its packages and an empty folder; not the files, processes, network or environment of
    this machine, and not this process. Everything that it started is gone when this returns. It is killed after
    `limits.seconds`, at `ends_at` (of `time.monotonic()`), and when the descriptor `stop` becomes readable.
    Raises SandboxError if the sandbox cannot be set up, ValueError for text that cannot be sent.
    """
    if limits.processes > 1 and mode not in modes.NAMESPACES:
        raise SandboxError(f"limits.processes={limits.processes} needs a process namespace, by which all of them end; in mode "
                           f"{mode!r} a program is one process")
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise SandboxError("SIGCHLD is ignored in this process, so exit codes are lost; set its handler to signal.SIG_DFL")
    _hide_this_process()
    job = {"program": program, "function": function, "args": args if isinstance(args, str) else list(args),
           "harness": harness, "packages": _packages(),
           "cpu_seconds": math.ceil(limits.seconds) + 1, "memory_mb": limits.memory_mb, "scratch_mb": limits.scratch_mb,
           "filter": _filter(limits.processes, mode) if syscalls.supported() else "", **modes.settings(mode, limits)}
    with contextlib.ExitStack() as stack:
        try:
            job_file, given = (_nameless(text, stack) for text in (json.dumps(job), stdin))
            report, writes_report = _pipe(stack)
            lifeline, go = _pipe(stack)  # the sandbox ends when this process, which holds the other end, is gone
        except OSError as error:
            raise SandboxError(f"no sandbox could be made: {error}; run fewer programs at a time, or raise the limit of open "
                               "files (ulimit -n)") from error
        process = stack.enter_context(_start(mode, (job_file, writes_report, lifeline), given))
        namespace: list[int] = []
        stack.callback(_end, process, namespace)
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)

        def begin():
            namespace.extend(os.pidfd_open(pid) for pid in children(process.pid))
            os.write(go, b"g")

        return _collect(process, ended, report, limits, ends_at, stop, begin)


def _start(mode: str, passed: tuple[int, int, int], given: int) -> subprocess.Popen:
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": inside.SCRATCH, "TMPDIR": inside.SCRATCH,
                   "OPENBLAS_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(modes.command(mode, passed), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                pass_fds=passed, env=environment, cwd="/", start_new_session=True)
    except OSError as error:
        raise SandboxError(f"no process could be started in a sandbox of mode {mode!r}: {error}") from error


def _end(process: subprocess.Popen, namespace: list[int]) -> None:
    """Kills the process with its group, and waits until the kernel has ended everything in its namespace.

    The group, as a child that has just been forked does not die with its parent yet: it would wait for it forever.

    `namespace` holds descriptors of the process's children, hence of the first process there, which dies with its parent and
    ends only after all others.
    """
    if process.returncode is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for first in namespace:
        _ready([first], _END_LIMIT)
        os.close(first)


class _Streams(NamedTuple):
    """What has been read of standard output, standard error and the report, by descriptor."""

    read: dict[int, bytearray]
    limit: int

    def take(self, number: int) -> bool:
        """Appends the available data; False at the end of the stream, or if none is available now."""
        try:
            part = os.read(number, 1 << 16)
        except BlockingIOError:
            return False
        self.read[number] += part
        return bool(part)

    @property
    def over(self) -> bool:
        return max(map(len, self.read.values())) > self.limit

    @property
    def started(self) -> bool:
        return bytes(list(self.read.values())[-1][:len(_READY)]) == _READY

    def finished(self, status: str, code: int) -> ProgramResult:
        stdout, stderr, report = (bytes(text[:self.limit]) for text in self.read.values())
        return ProgramResult(status, code, stdout, stderr, report.removeprefix(_READY))


def _collect(process: subprocess.Popen, ended: int, report: int, limits: ResourceLimits, ends_at: float, stop: int | None,
             begin: Callable[[], None]) -> ProgramResult:
    """Reads what the program writes until it ends; bounded in bytes and in time, whatever it does to its streams.

    `begin` lets the program start, once its sandbox is ready.
    """
    streams = _Streams({number: bytearray() for number in (process.stdout.fileno(), process.stderr.fileno(), report)},
                       limits.output_bytes)
    for number in streams.read:
        os.set_blocking(number, False)
    open_streams, others = set(streams.read), [ended] if stop is None else [ended, stop]
    end = min(time.monotonic() + _START_LIMIT, ends_at)
    started = False
    while True:
        ready = _ready([*open_streams, *others], end - time.monotonic())
        open_streams -= {number for number in ready & open_streams if not streams.take(number)}
        if not started and streams.started:
            begin()
            started, end = True, min(time.monotonic() + limits.seconds, ends_at)
        if streams.over:
            return streams.finished("output", -1)
        if ended in ready:
            break
        if time.monotonic() >= end or stop in ready:
            if not started and time.monotonic() < ends_at and stop not in ready:
                raise SandboxError(f"the sandbox was not set up within {_START_LIMIT:g} s")
            return streams.finished("timeout", -1)
    for number in open_streams:  # what it wrote before it ended
        while not streams.over and streams.take(number):
            pass
    code = process.wait()
    if not streams.started:
        said = b" ".join(bytes(text[:500]) for text in streams.read.values()).decode(errors="replace").strip()
        raise SandboxError(f"the sandbox was not set up (exit code {code}): {said or 'it says nothing'}")
    status = "output" if streams.over else "compile" if code == inside.COMPILE_ERROR else "done"
    return streams.finished(status, code if code >= 0 else 128 - code)


def _ready(numbers: list[int], seconds: float) -> set[int]:
    """The descriptors that can be read, after at most that time (`select` itself takes none above 1023)."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return {number for number, _ in poll.poll(max(seconds, 0) * 1000)}


def _nameless(text: str, stack: contextlib.ExitStack) -> int:
    """A file in memory that holds the text and has no name that a program could open."""
    number = _above_standard(os.memfd_create("given"))
    stack.callback(os.close, number)
    data = memoryview(text.encode())
    while data:
        data = data[os.write(number, data):]
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    reads, writes = map(_above_standard, os.pipe())
    for end in (reads, writes):
        stack.callback(os.close, end)
    return reads, writes


def _above_standard(number: int) -> int:
    """The descriptor under a number above the standard streams', in case this process has closed its own."""
    if number > 2:
        return number
    high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(number)
    return high


@functools.cache
def _filter(processes: int, mode: str) -> str:
    return syscalls.filter_of(processes, namespaces=mode in modes.NAMESPACES).hex()


@functools.cache
def _packages() -> list[str]:
    import site

    return [path for path in map(os.path.realpath, site.getsitepackages()) if os.path.isdir(path)]


@functools.cache
def _hide_this_process() -> None:
    """Keeps other processes of this user from reading this one's memory and environment (as with a set-user-ID program)."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))

"""The keeper of one worker process, which kills it together with everything that it started.

The end comes when the other side of the socket `control` closes, when the process that forked the keeper is gone, even by
SIGKILL, or when the worker ends. As a child subreaper the keeper inherits every orphan below it, in whatever session or
process group, so that nothing is left once it has no children. The last message on the socket is the exit code of the worker.
"""
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from jaxrl_llm.sandbox.children import children

PARENT_CHECK = 1.0  # seconds between two checks of the parent; the socket closes earlier, unless another process holds it too
END_LIMIT = 10.0  # seconds to end all processes; one that the kernel holds longer has its SIGKILL pending
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # for the run, which closes the socket
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Changes a setting of this process on Linux; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def start(work: Callable[[], None]) -> int:
    """The process id of a child that does `work`, in its own session; it dies with this process."""
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:  # else it has died before the line above
            work()
            os._exit(0)
    finally:
        os._exit(127)


def reap(worker: int, status: int | None) -> tuple[int | None, bool]:
    """Collects the children that have ended: the wait status of the worker, once known, and whether there are others."""
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        status = ended if pid == worker else status


def end_all(worker: int, status: int | None) -> int | None:
    """Kills children, including those inherited from killed processes, until there are none; returns the worker's status."""
    end = time.monotonic() + END_LIMIT
    while True:
        status, more = reap(worker, status)
        if not more or time.monotonic() > end:
            return status
        group = [(os.killpg, worker)] if status is None else []
        for send, target in [(os.kill, pid) for pid in children(os.getpid())] + group:
            try:
                send(target, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(1e-4)


def keep(work: Callable[[], None], control: socket.socket) -> None:
    """Keeps a worker that does `work` until it should end; then leaves nothing behind. Runs in its own process."""
    parent = os.getppid()
    os.setsid()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of any kind makes the signal write into the pipe
    worker, status = start(work), None
    for standard in (0, 1):  # they belong to the worker
        os.close(standard)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while status is None and os.getppid() == parent:
        ready = [descriptor for descriptor, _ in poll.poll(PARENT_CHECK * 1000)]
        if control.fileno() in ready:
            break
        if ended in ready:
            os.read(ended, 4096)
        status, _ = reap(worker, status)
    status = end_all(worker, status)
    try:
        control.send(str(os.waitstatus_to_exitcode(status)).encode() if status is not None else b"")
    except OSError:  # the other end is closed
        pass

"""Signals that ask a run to end. A notice of a coming kill, as clusters send it, lets the step be finished and saved; a Ctrl-C
stops at once, but waits for a save under way.

    with preemption.watch():
        with preemption.at_once():
            ...                         # raises Preempted where the signal comes: nothing would be lost
        for step in ...:
            ...
            preemption.check()      # raises Preempted here, between two steps, once a signal has come
            with preemption.undisturbed():
                ...                     # a Ctrl-C is raised after this
"""
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from jaxrl_llm import parallel

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_received: list[int] = []
_may_raise = False


class Preempted(SystemExit):
    """The process was asked to end; it exits with `EXIT_CODE` after everything on the way out has saved and closed."""

    def __init__(self):
        super().__init__(EXIT_CODE)


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Within it SIGTERM and SIGUSR1 no longer end the process but are remembered for `check`; the first is acknowledged.

    Python lets only the main thread handle signals: in any other nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {number: signal.signal(number, _remember) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


@contextlib.contextmanager
def at_once(condition: bool = True) -> Iterator[None]:
    """Within it, if `condition` holds, a signal raises `Preempted` where it comes: for work whose loss costs no trained step.

    In one of several processes it still waits for `check`: the others would wait for this one.
    """
    with _raising(condition and not parallel.several()):
        if _may_raise and _received:
            raise Preempted
        yield


@contextlib.contextmanager
def _raising(allowed: bool) -> Iterator[None]:
    global _may_raise
    before, _may_raise = _may_raise, allowed
    try:
        yield
    finally:
        _may_raise = before


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within it a first SIGINT is kept for the end, for what an exception in any line would leave half done; a second is not.

    The other signals wait for `check`. Nothing changes in threads other than the main one, and where SIGINT raises nothing.
    """
    handler, came = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        with _raising(False):
            yield
        return

    def remember(number, frame):
        if came:
            handler(number, frame)
        came.append(frame)
        print("interrupted: the run stops when its checkpoint is written; once more, and it stops at once", file=sys.stderr,
              flush=True)

    signal.signal(signal.SIGINT, remember)
    try:
        with _raising(False):
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])


def check() -> None:
    """Raises `Preempted` if a signal came to this process, or to any of several, since `watch` began."""
    if parallel.agree(len(_received)):
        raise Preempted


def _remember(number: int, frame) -> None:
    if not _received:
        what = "stops, nothing is lost" if _may_raise else "saves and stops after this step; continue it with --resume"
        print(f"{signal.Signals(number).name}: the run {what} (exit code {EXIT_CODE})", file=sys.stderr, flush=True)
    _received.append(number)
    if _may_raise and len(_received) == 1:  # a scheduler that repeats itself must not disturb the way out
        raise Preempted

"""Signals that ask a run to end: finish and save the step after a cluster's notice, stop at once after a Ctrl-C.

A notice is sent by clusters before they kill a process. A Ctrl-C only waits for a running save.

    with preemption.watch():
        with preemption.at_once():
            ...                         # raises Preempted when the signal arrives: nothing would be lost
        for step in ...:
            ...
            preemption.check()      # raises Preempted here, between two steps, after a signal has arrived
            with preemption.undisturbed():
                ...                     # a Ctrl-C is raised after this
"""
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator

from jaxrl_llm import parallel

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: no error, start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_received: list[int] = []
_interrupts: list[int] = []
_may_raise = False


class Preempted(SystemExit):
    """The process was asked to end; it exits with `EXIT_CODE` after all handlers on the way out have saved and closed."""

    def __init__(self):
        super().__init__(EXIT_CODE)


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """A context in which SIGTERM and SIGUSR1 do not end the process but are remembered for `check`; the first is acknowledged.

    A SIGINT raises its exception as before. Python drops what is raised in some places, JAX's callback of the garbage collector
    among them: `check` then raises it again. Only the main thread can handle signals: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    _interrupts.clear()
    handlers = dict.fromkeys(SIGNALS, _remember)
    if callable(handler := signal.getsignal(signal.SIGINT)):
        handlers[signal.SIGINT] = functools.partial(_interrupt, handler)
    before = {number: signal.signal(number, own) for number, own in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()
        _interrupts.clear()


@contextlib.contextmanager
def at_once(condition: bool = True) -> Iterator[None]:
    """A context in which, if `condition` holds, a signal raises `Preempted` at once: for work that loses no trained step.

    In one of several processes the signal still waits for `check`: the others would wait for this one.
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
    """A context that delays a first SIGINT, but not a second, to its end, for code that an exception would leave half done.

    The other signals wait for `check`. Nothing changes outside the main thread, and if SIGINT raises no exception.
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
        say("interrupted: the run stops when its checkpoint is written; once more, and it stops at once")

    signal.signal(signal.SIGINT, remember)
    try:
        with _raising(False):
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])


def say(text: str) -> None:
    """Prints on stderr, or nothing: a closed pipe or a full disk must not raise where a signal is handled."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the signal came within another print
        print(text, file=sys.stderr, flush=True)


def check() -> None:
    """Raises `Preempted` if this process, or any of several, received a signal since `watch` began; see there for SIGINT."""
    if _interrupts:
        raise KeyboardInterrupt
    if parallel.agree(len(_received)):
        raise Preempted


def _interrupt(handler, number: int, frame) -> None:
    _interrupts.append(number)
    handler(number, frame)


def _remember(number: int, frame) -> None:
    _received.append(number)
    if len(_received) == 1:
        what = "stops, nothing is lost" if _may_raise else "saves and stops after this step; continue it with --resume"
        say(f"{signal.Signals(number).name}: the run {what} (exit code {EXIT_CODE})")
    if _may_raise and len(_received) == 1:  # a repeated signal of a scheduler must not disturb the exit
        raise Preempted

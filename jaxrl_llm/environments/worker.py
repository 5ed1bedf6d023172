"""The inside of a process, or of a thread, in which environments live: one step further, by what was said so far."""
import functools
import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import environments
from jaxrl_llm.environments import base
from jaxrl_llm.tasks.base import Problem


class Call(NamedTuple):
    """Which trajectory goes on, and how it came here. `seen` is the fingerprint of the turns so far, "" for none."""

    target: str
    options: str  # JSON
    problem: Problem
    key: int
    said: Sequence[base.Message]
    seen: str


class Worker:
    """Keeps the states of the last `capacity` trajectories (None: of all) and makes others again by replay.

    A state is taken out while it is worked on and put back when that went well: what an error or a deadline left half done is
    never used again.
    """

    def __init__(self, capacity: int | None):
        self._capacity, self._lock = capacity, threading.Lock()
        self._kept: OrderedDict[tuple, tuple[int, str, Any]] = OrderedDict()

    def __call__(self, *call) -> Mapping[str, Any]:
        """The next turn of `Call(*call)` as `{"turn": ...}`, or `{"failed": (kind, why)}` for an error of `base.KINDS`."""
        call = Call(*call)
        trajectory = (call.target, call.options, call.key, call.problem.id)
        environment = _environment(call.target, call.options)
        try:
            state, turn = self._next(environment, trajectory, call)
        except tuple(base.KINDS) as error:
            return {"failed": (next(kind for of, kind in base.KINDS.items() if isinstance(error, of)), str(error))}
        if not turn.done:
            with self._lock:
                self._kept[trajectory] = len(call.said), base.digest([turn], call.seen), state
                while self._capacity is not None and len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
        return {"turn": turn}

    def drop(self, target: str, options: str, key: int, problem: Problem) -> None:
        """Forgets a trajectory that nobody goes on with."""
        with self._lock:
            self._kept.pop((target, options, key, problem.id), None)

    def _next(self, environment: base.Environment, trajectory: tuple, call: Call) -> tuple[Any, base.Turn]:
        with self._lock:
            count, seen, state = self._kept.pop(trajectory, (-1, "", None))
        if not call.said:
            return base.begin(environment, call.problem, call.key)
        if (count, seen) != (len(call.said) - 1, call.seen):
            state, turns = base.replay(environment, call.problem, call.key, call.said[:-1])
            if base.digest(turns) != call.seen:
                raise RuntimeError("played again, the environment said something else: it is not replayable; say so "
                                   "(replayable=False) and run it in threads, or make its chance depend on problem and key")
        return state, base.advance(environment, state, call.said[-1])


@functools.cache
def _environment(target: str, options: str) -> base.Environment:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored in copies of a template; programs of tools have exit codes
    return environments.make(target, **json.loads(options))


advance = Worker(capacity=256)

"""The worker in a process or thread that holds environments: it makes one step, given the messages so far."""
import functools
import json
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import environments
from jaxrl_llm.environments import base
from jaxrl_llm.tasks.base import Problem


class StepRequest(NamedTuple):
    """The trajectory to continue and its messages so far. `seen` is the fingerprint of its turns, "" for none."""

    target: str
    options: str  # JSON
    problem: Problem
    key: int
    said: Sequence[base.Message]
    seen: str


class States:
    """Keeps the states of the last `capacity` trajectories (None: of all) and rebuilds others by replay.

    A state is removed during its step and put back if the step succeeds: a state left half done by an error or a deadline is
    never used again, and the state of a step that ends after its trajectory was dropped is not kept. `environment`: the
    environment of all calls; None: each call names its own.
    """

    def __init__(self, capacity: int | None, environment: base.Environment | None = None):
        self._capacity, self._environment, self._lock = capacity, environment, threading.Lock()
        self._kept: OrderedDict[tuple, tuple[Sequence[base.Message], str, Any]] = OrderedDict()  # messages, fingerprint, state
        self._steps: dict[tuple, object] = {}  # the running step of each trajectory

    def __call__(self, *call) -> Mapping[str, Any]:
        """The next turn of `StepRequest(*call)` as `{"turn": ...}`, or `{"failed": (kind, why)}` for an error of `base.KINDS`.

        Either also has the `seconds` of the environment's `reset` or `step`, without those of a replay before it.
        """
        given = StepRequest(*call)
        given = given._replace(said=list(given.said))  # in threads this is the runner's list, which keeps growing
        trajectory, step, after = (given.target, given.options, given.key, given.problem.id), object(), None
        with self._lock:
            self._steps[trajectory] = step
            kept = self._kept.pop(trajectory, None)
        start = time.perf_counter()
        try:
            environment = self._environment or _environment(given.target, given.options)
            state = self._state(environment, given, kept) if given.said else None
            start = time.perf_counter()
            if given.said:
                turn = base.advance(environment, state, given.said[-1])
            else:
                state, turn = base.begin(environment, given.problem, given.key)
            seconds = time.perf_counter() - start
            if not turn.done:
                after = given.said, base.digest([turn], given.seen), state
        except tuple(base.KINDS) as error:
            kind = next(kind for of, kind in base.KINDS.items() if isinstance(error, of))
            return {"failed": (kind, str(error)), "seconds": time.perf_counter() - start}
        finally:
            self._put_back(trajectory, step, after)
        return {"turn": turn, "seconds": seconds}

    def drop(self, target: str, options: str, key: int, problem: Problem) -> None:
        """Forgets a trajectory that will not be continued."""
        with self._lock:
            self._steps.pop((target, options, key, problem.id), None)
            self._kept.pop((target, options, key, problem.id), None)

    def close(self) -> None:
        """Forgets all trajectories."""
        with self._lock:
            self._steps.clear()
            self._kept.clear()

    def _put_back(self, trajectory: tuple, step: object, after: tuple[Sequence[base.Message], str, Any] | None) -> None:
        """Keeps the state after a step, unless its trajectory was dropped or the step was retried meanwhile."""
        with self._lock:
            if self._steps.get(trajectory) is not step:
                return
            del self._steps[trajectory]
            if after is not None:
                self._kept[trajectory] = after
                while self._capacity is not None and len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)

    def _state(self, environment: base.Environment, call: StepRequest,
               kept: tuple[Sequence[base.Message], str, Any] | None) -> Any:
        """The state before the last message: the kept one, or one rebuilt by replay."""
        if kept is not None and kept[:2] == (call.said[:-1], call.seen):
            return kept[2]
        state, turns = base.replay(environment, call.problem, call.key, call.said[:-1])
        if base.digest(turns) != call.seen:
            raise RuntimeError("the environment answered differently when it was replayed; set replayable=False and run it in "
                               "threads, or draw its random numbers from problem and key alone")
        return state


@functools.cache
def _environment(target: str, options: str) -> base.Environment:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored in copies of a template; programs of tools have exit codes
    return environments.make(target, **json.loads(options))


advance = States(capacity=256)

"""Many environments at once, off the device's path: deadlines, retries, and trajectories that are lost, not punished."""
import json
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import environments
from jaxrl_llm.environments import base, worker
from jaxrl_llm.registry import one_of
from jaxrl_llm.rewards.pool import WorkerPool, cores
from jaxrl_llm.rewards.process import Outcome
from jaxrl_llm.rewards.worker import describe
from jaxrl_llm.tasks.base import Problem


class TooManyInvalid(RuntimeError):
    """More trajectories were lost to their environment than a run may go on with."""


class Invalid(NamedTuple):
    """Why a trajectory has no reward: `kind` is "error", "timeout", "crash" or "rubbish", `turn` counts from 0, the opening."""

    kind: str
    turn: int
    message: str


class Recording(NamedTuple):
    """All that a trajectory is made of beside its environment: enough to play it again alone."""

    problem: Problem
    key: int
    said: list[base.Message]


class Runner:
    """Plays trajectories of one environment, `make(target, **options)`, many at a time.

    With kind "processes" a step that is late, dies or fills the memory is killed, with all that it started; every step can be
    made by any process, which plays again what it does not remember. "threads" are for environments that wait (for servers,
    for sandboxes): a step that is late is abandoned, since Python cannot end a thread, and states stay where they are.

    A step is tried `retries` more times where the environment is replayable. Then its trajectory is invalid: it has no reward,
    neither 0 nor any other, `invalid` says why and `counts` how often ("NAME/timeout"). More than `limit` of the trajectories
    since the last `forget` end in TooManyInvalid. `deadline`: seconds for a step, replay included.
    """

    def __init__(self, target: str, options: Mapping[str, Any] | None = None, *, seed: int, kind: str = "processes",
                 workers: int | None = None, deadline: float = 30.0, retries: int = 1, limit: float = 0.25):
        one_of("kind of runner", kind, ("processes", "threads"))
        if retries < 0 or not 0 <= limit <= 1:
            raise ValueError(f"retries={retries}, limit={limit}; need none or more retries and a share in [0, 1]")
        self.environment = environments.make(target, **(options or {}))
        if kind == "processes" and not self.environment.replayable:
            raise ValueError(f"environment {self.environment.name!r} is not replayable, so its states cannot move between "
                             "processes; use kind='threads'")
        self._target, self._options, self._seed, self._limit = target, json.dumps(dict(options or {})), seed, limit
        self._retries = retries if self.environment.replayable else 0
        self._states = worker.Worker(capacity=None)  # of threads; processes have their own
        self._pool = (WorkerPool("jaxrl_llm.environments.worker:advance", workers, deadline) if kind == "processes"
                      else Threads(self._states, workers, deadline))
        self._running: dict[int, tuple[Recording, str]] = {}  # and the fingerprint of their turns
        self._recordings: dict[int, Recording] = {}
        self._opened = 0
        self.invalid: dict[int, Invalid] = {}
        self.counts: Counter = Counter()

    def reset(self, problems: Mapping[int, Problem]) -> dict[int, base.Turn]:
        """Opens a trajectory of each problem, by uid. What is missing in the result is in `invalid`.

        Raises ValueError for a uid that is known, TooManyInvalid.
        """
        known = problems.keys() & (self._recordings.keys() | self._running.keys())
        if known:
            raise ValueError(f"the trajectories {sorted(known)[:5]} have been opened before; every one has a uid of its own")
        self._opened += len(problems)
        for uid, problem in problems.items():
            self._running[uid] = Recording(problem, base.key_of(self._seed, uid), []), ""
        return self._advance(list(problems))

    def step(self, said: Mapping[int, base.Message]) -> dict[int, base.Turn]:
        """The turns after what the policy said, by uid. What is missing in the result is in `invalid`.

        Raises ValueError for a trajectory that is not running, TooManyInvalid.
        """
        strange = said.keys() - self._running.keys()
        if strange:
            uid = min(strange)
            raise ValueError(f"trajectory {uid} is not running: " + (f"it is invalid ({self.invalid[uid].message})"
                             if uid in self.invalid else "it has ended, or has never been opened"))
        for uid, message in said.items():
            self._running[uid][0].said.append(dict(message))
        return self._advance(list(said))

    def recording(self, uid: int) -> Recording:
        """What a trajectory is made of so far: for checkpoints, and to play it again."""
        return self._running[uid][0] if uid in self._running else self._recordings[uid]

    def replay(self, uid: int) -> list[base.Turn]:
        """Plays a trajectory again here, alone and without a deadline; raises what its environment raises."""
        return base.replay(self.environment, *self.recording(uid))[1]

    def end(self, uids: Sequence[int]) -> None:
        """Ends trajectories that the policy does not go on with, say because they are too long."""
        for uid in uids:
            recording, _ = self._running.pop(uid)
            self._states.drop(self._target, self._options, recording.key, recording.problem)
            self._recordings[uid] = recording

    def forget(self) -> None:
        """Drops all that is known of ended and invalid trajectories, when a batch has been learned from; counts start anew."""
        self._recordings.clear()
        self.invalid.clear()
        self.counts.clear()
        self._opened = len(self._running)

    def close(self) -> None:
        """Ends the processes; a later step starts new ones."""
        self._pool.close()

    def _advance(self, uids: Sequence[int]) -> dict[int, base.Turn]:
        turns, waiting = {}, list(uids)
        for attempt in range(self._retries + 1):
            calls = [(self._target, self._options, *self._running[uid][0], self._running[uid][1]) for uid in waiting]
            failed = {}
            for uid, outcome in zip(waiting, self._pool.map(calls)):
                found = _read(outcome)
                if isinstance(found, base.Turn):
                    turns[uid] = found
                else:
                    failed[uid] = found
            waiting = list(failed)
            if not waiting:
                break
        for uid, (kind, message) in failed.items():
            self.invalid[uid] = Invalid(kind, len(self.recording(uid).said), message)
            self.counts[f"{self.environment.name}/{kind}"] += 1
            self._recordings[uid] = self._running.pop(uid)[0]
        for uid, turn in turns.items():
            recording, seen = self._running[uid]
            self._running[uid] = recording, base.digest([turn], seen)
            if turn.done:
                self._recordings[uid] = self._running.pop(uid)[0]
        self._check()
        return {uid: turns[uid] for uid in uids if uid in turns}

    def _check(self) -> None:
        if len(self.invalid) <= self._limit * self._opened:
            return
        uid, first = next(iter(self.invalid.items()))
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        raise TooManyInvalid(
            f"{len(self.invalid)} of {self._opened} trajectories are invalid ({counts}), more than the share of "
            f"{self._limit:g}; the first: uid {uid}, problem {self.recording(uid).problem.id}, turn {first.turn}, "
            f"{first.kind}: {first.message}. `runner.replay({uid})` plays it again alone; a higher limit goes on without such "
            "trajectories")


def _read(outcome: Outcome) -> base.Turn | tuple[str, str]:
    """The turn, or the kind of failure and a message. What a process said is checked again."""
    if outcome.status != "ok":
        return outcome.status, outcome.message
    if "failed" in outcome.value:
        kind, message = outcome.value["failed"]
        return kind, message
    return base.Turn(*outcome.value["turn"])


class Threads:
    """Calls of a function in up to `workers` threads (None: four a core), each abandoned after `deadline` seconds.

    The threads are daemons, which those of `concurrent.futures` are not: one that hangs would keep the program from ending.
    """

    def __init__(self, function: Callable[..., Any], workers: int | None, deadline: float):
        self._function, self._workers, self._deadline = function, 4 * cores() if workers is None else workers, deadline
        if self._workers < 1 or not deadline > 0:
            raise ValueError(f"workers={workers}, deadline={deadline}; need at least one worker, a positive deadline")

    def map(self, calls: Sequence[tuple]) -> list[Outcome]:
        """The outcome of each argument tuple, in order."""
        outcomes: list[Outcome] = [Outcome("timeout", message=f"no result within {self._deadline:g} s")] * len(calls)
        waiting, ends, done = deque(range(len(calls))), {}, queue.SimpleQueue()

        def work(row: int):
            try:
                done.put((row, Outcome("ok", self._function(*calls[row]))))
            except BaseException as error:  # SystemExit as well
                done.put((row, Outcome("error", message=describe(error))))

        while waiting or ends:
            while waiting and len(ends) < self._workers:
                row = waiting.popleft()
                ends[row] = time.monotonic() + self._deadline
                threading.Thread(target=work, args=(row,), name="environment", daemon=True).start()
            try:
                row, outcome = done.get(timeout=max(min(ends.values()) - time.monotonic(), 0))
                if ends.pop(row, None) is not None:  # not one that was given up
                    outcomes[row] = outcome
            except queue.Empty:
                ends = {row: end for row, end in ends.items() if end > time.monotonic()}
        return outcomes

    def close(self) -> None:
        """Nothing is kept running."""

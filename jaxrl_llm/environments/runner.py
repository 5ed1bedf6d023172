"""Many environments at once, outside the device's path: deadlines, retries, and trajectories lost without a penalty."""
import copy
import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm import environments, parallel
from jaxrl_llm.environments import base, worker
from jaxrl_llm.environments.compiled import Compiled
from jaxrl_llm.environments.threads import Threads
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.process import Outcome
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.registry import one_of


class TooManyInvalid(RuntimeError):
    """The environment lost more trajectories than a run tolerates."""

    of_environment = True


class AllInvalid(TooManyInvalid):
    """The environment lost all trajectories of a batch, which may be few."""


class Invalid(NamedTuple):
    """Why a trajectory has no reward: `kind` is "error", "timeout", "crash" or "rubbish", `turn` counts from 0, the opening."""

    kind: str
    turn: int
    message: str


class Recording(NamedTuple):
    """The data of a trajectory beside its environment: enough to replay it alone."""

    problem: Problem
    key: int
    said: list[base.Message]


class Lost(NamedTuple):
    """An invalid trajectory in types of JSON: why it is invalid (see `Invalid`), and all that a replay needs.

    `problem` is the number of its problem, `seen` the fingerprint of its turns before the failure, `host` the machine and the
    process that played it, if several processes do.
    """

    uid: int
    problem: int
    kind: str
    turn: int
    message: str
    key: int
    seen: str
    said: list[base.Message]
    host: str = ""


class Tally(NamedTuple):
    """How many trajectories a process has `opened` since a batch began, and those that it has `lost`."""

    opened: int
    lost: list[Lost]


class Runner:
    """Plays trajectories of one environment, `make(target, **options)`, many at a time.

    With kind "processes" a step that is late, dies or fills the memory is killed with all its child processes; any process can
    make any step, and replays trajectories that it does not remember. "threads" are for environments that wait (for servers,
    for sandboxes): a step that is late is abandoned, since Python cannot end a thread, and states stay in this process.
    "compiled" is for games of arrays (`compiled.environment_of`): the games of a call step in one program.

    If the environment is replayable, a failed step is retried `retries` times. Then its trajectory is invalid: it has no
    reward, neither 0 nor any other, `invalid` has the reason and `counts` the number of such failures ("NAME/timeout"), and
    `report` is called with it. If more than the share `limit` of the trajectories since the last `forget` are invalid,
    TooManyInvalid is raised. `deadline`: seconds for a step, including replay. `seconds` are those of each call of the
    environment's `reset` and `step`; calls that were given up count as the deadline, other calls without an answer not at all.
    `waits` overrules the environment's own, see `Environment.waits`. `joint`: it plays some trajectories of a batch, and other
    processes play others; the share is then one of all of them, and only `check` raises TooManyInvalid.
    """

    def __init__(self, target: str, options: Mapping[str, Any] | None = None, *, seed: int, kind: str = "processes",
                 workers: int | None = None, deadline: float = 30.0, retries: int = 1, limit: float = 0.25,
                 waits: bool | None = None, joint: bool = False):
        one_of("kind of runner", kind, ("processes", "threads", "compiled"))
        if retries < 0 or not 0 <= limit <= 1:
            raise ValueError(f"retries={retries}, limit={limit}; allowed are 0 or more retries and a share in [0, 1]")
        made = environments.make(target, **(options or {}))
        self.environment = made if waits is None else dataclasses.replace(made, waits=waits)
        self._kind, self._workers, self._joint = kind, workers, joint
        if kind == "processes" and not self.environment.replayable:
            raise ValueError(f"environment {self.environment.name!r} is not replayable, so its states cannot move between "
                             "processes; use kind='threads'")
        self._target, self._options, self.seed, self._limit = target, json.dumps(dict(options or {})), seed, limit
        self._retries, self._deadline = retries if self.environment.replayable else 0, deadline
        self.report: Callable[[Lost], None] = lambda lost: None
        self._begin()

    def _begin(self, pool: WorkerPool | None = None) -> None:
        """Begins without trajectories; `pool`: the processes that play them."""
        if self._kind == "compiled":
            self._states: Any = Compiled(self.environment)
            self._pool: Any = self._states
        else:
            self._states = worker.States(None, self.environment)  # states in this process: other processes have their own
            self._pool = (Threads(self._states, self._workers, self._deadline) if self._kind == "threads" else
                          pool or WorkerPool("jaxrl_llm.environments.worker:advance", self._workers, self._deadline))
        self._running: dict[int, tuple[Recording, str]] = {}  # and the fingerprint of their turns
        self._recordings: dict[int, Recording] = {}
        self._sent: Counter = Counter()  # attempts of the pending step, by uid
        self._opened = 0
        self._lost: dict[int, Lost] = {}  # since the batch began, of other processes as well where they are known
        self.invalid: dict[int, Invalid] = {}
        self.counts: Counter = Counter()
        self.seconds: list[float] = []

    def reset(self, problems: Mapping[int, Problem]) -> dict[int, base.Turn]:
        """Opens a trajectory of each problem, by uid. Trajectories missing in the result are in `invalid`.

        Raises ValueError for a known uid, and TooManyInvalid.
        """
        known = problems.keys() & (self._recordings.keys() | self._running.keys())
        if known:
            raise ValueError(f"the trajectories {sorted(known)[:5]} are already opened; give each its own uid")
        self._opened += len(problems)
        for uid, problem in problems.items():
            self._running[uid] = Recording(problem, base.key_of(self.seed, uid), []), ""
        return self._advance(list(problems))

    def step(self, said: Mapping[int, base.Message]) -> dict[int, base.Turn]:
        """The turns after the policy's messages, by uid. Trajectories missing in the result are in `invalid`.

        Raises ValueError for a trajectory that is not running, and TooManyInvalid.
        """
        self._hear(said)
        return self._advance(list(said))

    def send(self, said: Mapping[int, base.Message]) -> None:
        """Begins steps without waiting for them; `recv` returns their turns. Only for runners with kind "threads".

        Raises ValueError for another kind, and for a trajectory that is not running or whose last step is not finished.
        """
        if not isinstance(self._pool, Threads):
            raise ValueError("steps are sent and received one by one in threads only; use kind='threads', or step")
        self._hear(said)
        for uid in said:
            self._try(uid)

    def recv(self, least: int = 1) -> dict[int, base.Turn]:
        """Returns the turns of finished steps in order of completion.

        Blocks until `least` are available, or no step is pending; with `least` 0 it does not block. The first M of N
        environments are received without waiting for the slow ones (EnvPool, arXiv 2206.10558), whose trajectories continue.
        Lost trajectories have no turn. Raises TooManyInvalid.
        """
        turns: dict[int, base.Turn] = {}
        while self._sent and (ended := self._pool.ready(min(max(least - len(turns), 0), len(self._sent)))):
            for uid, outcome in ended:
                if uid not in self._sent:
                    continue  # it was ended
                result = self._result(outcome)
                if isinstance(result, base.Turn):
                    del self._sent[uid]
                    turns[uid] = result
                    self._settle(uid, result)
                elif self._sent[uid] <= self._retries:
                    self._try(uid)
                else:
                    del self._sent[uid]
                    self._lose(uid, *result)
        self._check()
        return turns

    def resume(self, recordings: Mapping[int, Recording]) -> dict[int, base.Turn]:
        """Resumes trajectories at the end of their recordings, in this or another process; their last turns by uid.

        Raises ValueError if the environment is not replayable or the runner has another seed, and the errors of `reset`.
        """
        if not self.environment.replayable:
            raise ValueError(f"environment {self.environment.name!r} is not replayable, so its trajectories cannot be resumed")
        for uid, recording in recordings.items():
            if recording.key != base.key_of(self.seed, uid):
                raise ValueError(f"trajectory {uid} was recorded with another key than that of seed={self.seed}; give the "
                                 "runner the seed of the run that recorded it")
        turns = self.reset({uid: recording.problem for uid, recording in recordings.items()})
        for count in range(max((len(one.said) for one in recordings.values()), default=0)):
            turns |= self.step({uid: one.said[count] for uid, one in recordings.items()
                                if count < len(one.said) and uid in self._running})
        return {uid: turn for uid, turn in turns.items() if uid not in self.invalid}

    def runs(self, uid: int) -> bool:
        """Whether a trajectory is open: neither ended nor lost."""
        return uid in self._running

    def recording(self, uid: int) -> Recording:
        """The data of a trajectory so far, for checkpoints and replay."""
        return self._running[uid][0] if uid in self._running else self._recordings[uid]

    def replay(self, uid: int) -> list[base.Turn]:
        """Replays a trajectory in this process, alone and without a deadline; raises the environment's errors."""
        return base.replay(self.environment, *self.recording(uid))[1]

    def end(self, uids: Sequence[int]) -> None:
        """Ends trajectories that the policy does not continue, for instance because they are too long."""
        for uid in uids:
            self._sent.pop(uid, None)
            self._end(uid)

    def drop(self) -> None:
        """Ends all trajectories after an error of their batch; threads give up the steps that they make or that wait."""
        if isinstance(self._pool, Threads):
            self._pool.close()
        self.end([*self._running])

    def apart(self) -> "Runner":
        """A runner of the same environment without any of these trajectories, which reports as this one.

        Worker processes, which keep no trajectories, are shared.
        """
        other = copy.copy(self)
        other.report = lambda lost: self.report(lost)
        other._begin(self._pool if self._kind == "processes" else None)
        return other

    def taken(self) -> tuple[Counter, list[float]]:
        """`counts` and `seconds`, which restart at 0; drops the records of ended trajectories that are not invalid."""
        taken = self.counts, self.seconds
        self.counts, self.seconds = Counter(), []
        self._recordings = {uid: self._recordings[uid] for uid in self.invalid}
        return taken

    def forget(self) -> None:
        """Drops the records of ended and invalid trajectories, before a new batch; counts and shares restart at 0."""
        self.invalid.clear()
        self._lost.clear()
        self.taken()
        self._opened = len(self._running)

    def close(self) -> None:
        """Ends the processes and drops all states. A later step starts new processes, and replays trajectories."""
        self._pool.close()
        self._states.close()

    def _advance(self, uids: Sequence[int]) -> dict[int, base.Turn]:
        turns, waiting = {}, list(uids)
        for attempt in range(self._retries + 1):
            failed = {}
            for uid, outcome in zip(waiting, self._pool.map([self._call(uid) for uid in waiting])):
                result = self._result(outcome)
                if isinstance(result, base.Turn):
                    turns[uid] = result
                else:
                    failed[uid] = result
            waiting = list(failed)
            if not waiting:
                break
        for uid, (kind, message) in failed.items():
            self._lose(uid, kind, message)
        for uid, turn in turns.items():
            self._settle(uid, turn)
        self._check()
        return {uid: turns[uid] for uid in uids if uid in turns}

    def _hear(self, said: Mapping[int, base.Message]) -> None:
        """Adds messages to the recordings of their trajectories. First raises ValueError if one of these cannot continue."""
        strange = said.keys() - self._running.keys()
        if strange:
            uid = min(strange)
            raise ValueError(f"trajectory {uid} is not running: " + (f"it is invalid ({self.invalid[uid].message})"
                             if uid in self.invalid else "it has ended, or has never been opened"))
        waited = said.keys() & self._sent.keys()
        if waited:
            raise ValueError(f"the last step of trajectory {min(waited)} was sent and not received; call recv first")
        for uid, message in said.items():
            self._running[uid][0].said.append(dict(message))

    def _call(self, uid: int) -> tuple:
        return self._target, self._options, *self._running[uid][0], self._running[uid][1]

    def _try(self, uid: int) -> None:
        self._sent[uid] += 1
        self._pool.submit(uid, self._call(uid))

    def _result(self, outcome: Outcome) -> base.Turn | tuple[str, str]:
        """The turn, or the kind of failure and a message. A process's answer is checked again."""
        if outcome.status == "timeout":
            self.seconds.append(self._deadline)
        if outcome.status != "ok":
            return outcome.status, outcome.message
        self.seconds.append(float(outcome.value["seconds"]))
        if "failed" in outcome.value:
            kind, message = outcome.value["failed"]
            return kind, message
        return base.Turn(*outcome.value["turn"])

    def _settle(self, uid: int, turn: base.Turn) -> None:
        """Records a turn; a `done` turn ends the trajectory."""
        recording, seen = self._running[uid]
        self._running[uid] = recording, base.digest([turn], seen)
        if turn.done:
            self._end(uid)

    def _lose(self, uid: int, kind: str, message: str) -> None:
        """Marks a trajectory as invalid, counts why, and reports it."""
        (problem, key, said), seen = self._running[uid]
        self.invalid[uid] = Invalid(kind, len(said), message)
        self.counts[f"{self.environment.name}/{kind}"] += 1
        self._end(uid)
        host = f"{platform.node()} (process {jax.process_index()})" if self._joint else ""
        self._lost[uid] = lost = Lost(uid, problem.id, kind, len(said), message, key, seen, said, host)
        self.report(lost)

    def _end(self, uid: int) -> None:
        """Keeps the recording of a trajectory and drops its state."""
        recording = self._recordings[uid] = self._running.pop(uid)[0]
        self._states.drop(self._target, self._options, recording.key, recording.problem)

    def _check(self) -> None:
        if not self._joint:
            self.check(self.tallies())

    def tallies(self) -> list[Tally]:
        """What was lost since the batch began: here, or by all processes that play it. Reports what others lost."""
        mine = Tally(self._opened, [self._lost[uid] for uid in self.invalid])
        tallies = parallel.gather_objects(mine) if self._joint else [mine]
        for lost in (one for tally in tallies for one in tally.lost if one.uid not in self._lost):
            self._lost[lost.uid] = lost
            self.report(lost)
        return tallies

    def check(self, tallies: Sequence[Tally]) -> None:
        """Raises TooManyInvalid if more than the share `limit` of the trajectories are lost."""
        lost, opened = [one for tally in tallies for one in tally.lost], sum(tally.opened for tally in tallies)
        if len(lost) <= self._limit * opened:
            return
        first, kinds = lost[0], Counter(f"{one.kind} on {one.host}" if one.host else one.kind for one in lost)
        counts = ", ".join(f"{self.environment.name}/{kind} {count}" for kind, count in kinds.items())
        raise TooManyInvalid(
            f"{len(lost)} of {opened} trajectories are invalid ({counts}), more than the share of {self._limit:g}; the first: "
            f"uid {first.uid}, problem {first.problem}, turn {first.turn}, {first.kind}: {first.message}. "
            f"`runner.replay({first.uid})` plays it again alone; a higher limit continues without such trajectories")

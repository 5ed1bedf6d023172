"""Sampling beside learning: each batch is sampled with weights that are some batches old."""
import collections
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxrl_llm import methods
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.schedules import sync
from jaxrl_llm.learning.schedules.base import BatchSource, Schedule, Step, schedule
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.tools.ranges import NOT_NEGATIVE
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.tools.timer import PhaseTimer


def _uncorrected(schedule: Schedule, objective: Any) -> str:
    """Why older samples would be learned from as if they were new; "": the objective has a ratio, or corrects for them."""
    if not schedule.lag or objective.corrects or objective.reads_old:
        return ""
    able = [slug for slug in methods.METHODS if methods.build(slug, max_len=1024, feature_size=67)[1].corrects]
    return (f"the schedule samples with weights that are {schedule.lag} batches older, and the objective has no ratio that "
            f"corrects for it; methods with a correction are {', '.join(able)}; PPO's ratio, as in grpo, is one to the policy "
            "that sampled")


_CONFLICTS = (
    Conflict(("schedule", "objective"), _uncorrected, "set schedule=sync, or take one of them"),
    Conflict(("schedule", "config.schedule", "config.sampling.top_k", "config.sampling.top_p", "config.sampling.min_p"),
             "config.schedule={1!r} divides by the sampler's probabilities, which top_k, top_p and min_p change",
             "switch them off (0, 1, 0), or set schedule=sync",
             lambda schedule, name, top_k, top_p, min_p: schedule.lag and (top_k or top_p < 1 or min_p)),
    Conflict(("schedule", "config.schedule", "config.server.url"), "config.schedule={1!r} needs the sampler of this process, "
             "and server.url is {2!r}", "leave one of the two out", lambda schedule, name, url: schedule.lag and url))


@schedule(conflicts=_CONFLICTS, ranges={"lag": NOT_NEGATIVE})
def pipelined(*, lag: int = 1) -> Schedule:
    """Batch n is sampled by the weights and settings of version `max(n - lag, 0)`, while batch `n - lag` is learned from.

    What is sampled is a function of the seed, however long anything takes. On one device both go on at the same time; on
    several devices, whose programs must begin in one order, one after the other. `lag=0` is `sync`. An error of sampling is
    raised after the step beside it; a run that continues there samples the missing batch with its newest weights.
    """
    return Schedule(_Steps(lag) if lag else sync.steps, lag)


class _Steps:
    """The steps of `pipelined`, see `Schedule`."""

    def __init__(self, lag: int):
        self.lag = lag

    def __call__(self, source: BatchSource, learner: Learner, state: TrainState, frozen: Mapping[str, Any] | None = None,
                 timer: PhaseTimer | None = None, phase: Callable[[str], None] = lambda name: None,
                 pending: tuple[Finished, ...] = ()) -> Generator[Step, TrainState | None, None]:
        if not (learner.as_sampled or learner.objective.corrects):
            raise ValueError(f"pipelined(lag={self.lag}): this learner was made for batches of its newest weights; build the "
                             "run with config.schedule, which takes the log-probs of sampling as old ones, or refuses a method")
        timer, waiting = timer or PhaseTimer(), collections.deque(pending)
        begin = _beside if learner.mesh.size == 1 else _at_once
        if len(waiting) < self.lag:
            phase("sampling")
            first = learner.publish(state, apart=True)
            waiting.extend(source.next(first, timer) for _ in range(self.lag - len(waiting)))
            del first  # no second copy beside the next one
        while True:
            phase("learning")
            position, failed = source.position(), None
            sampled = begin(source, learner.publish(state, apart=True), timer)
            finished = waiting.popleft()
            learned = learner.learn(state, finished.rollouts, frozen, timer, finished.facts, finished.replayed)
            phase("sampling")
            try:
                waiting.append(sampled())
                position = source.position()
            except BaseException as error:  # also a Ctrl-C: raised when the step, whose old state is consumed, can be saved
                failed = error
            state = (yield Step(position, finished, learned, tuple(waiting))) or learned.state
            if failed is not None:
                raise failed
            del finished, learned  # frees memory for the next ones


def _at_once(source: BatchSource, snapshot: Snapshot, timer: PhaseTimer) -> Callable[[], Finished]:
    """The next batch, sampled before this returns."""
    finished = source.next(snapshot, timer)
    return lambda: finished


def _beside(source: BatchSource, snapshot: Snapshot, timer: PhaseTimer) -> Callable[[], Finished]:
    """A function that waits for the next batch, which a thread samples from now on.

    Metrics `beside/PHASE` are the seconds of its phases, which the phases of the step do not include. Nobody waits for the
    thread at an interrupt, also while an environment is silent.
    """
    result: concurrent.futures.Future[Finished] = concurrent.futures.Future()

    def run():
        own = PhaseTimer()
        try:
            finished = source.next(snapshot, own)
            seconds = {f"beside/{name.removeprefix('time/')}": took for name, took in own.collect().items()}
            result.set_result(finished._replace(metrics=finished.metrics | seconds))
        except BaseException as error:  # raised where the batch is used
            result.set_exception(error)

    threading.Thread(target=run, name="sampling", daemon=True).start()

    def wait() -> Finished:
        with timer("wait"):
            return result.result()

    return wait

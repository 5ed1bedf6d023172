"""The interface of a schedule, the order of sampling and learning, and the table of those that runs name in `config.schedule`.

To add one, write a function under `@schedule`, in a file of this folder or of your own ("module:function"):

    @schedule
    def sync() -> Schedule:
        def steps(source, learner, state, frozen=None, timer=None, phase=print, pending=()):
            while True:
                finished = source.next(learner.publish(state), timer)
                position = source.position()
                learned = learner.learn(state, finished.rollouts, frozen, timer, finished.facts, finished.replayed)
                state = (yield Step(position, finished, learned)) or learned.state

        return Schedule(steps)
"""
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.finished import Finished
from jaxrl_llm.learning.learner import Learned
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.timer import PhaseTimer


class BatchSource(Protocol):
    """What a schedule asks of a source of rollouts, see `sampling.source.Source`."""

    stream: Any

    def next(self, snapshot: Snapshot, timer: PhaseTimer | None = None) -> Finished:
        """One batch, sampled as the snapshot says."""

    def position(self) -> dict[str, Any]:
        """Where the source continues after the batches so far."""


class Step(NamedTuple):
    """A finished step, the results of its sampling and learning, and where the run continues.

    `position`: that of the source; `pending`: batches that are sampled and not yet learned from, in their order.
    """

    position: dict[str, Any]
    finished: Finished
    learned: Learned
    pending: tuple[Finished, ...] = ()


class Schedule(NamedTuple):
    """`steps(source, learner, state, frozen, timer, phase, pending)` is an endless generator of steps.

    It calls `phase("sampling")` and `phase("learning")` where it waits for them. A state sent into the generator replaces the
    yielded one. `pending` are those of the step after which the run continues, and empty at its start. `lag`: the largest
    number of batches by which the weights that sample are older than those that learn.
    """

    steps: Callable[..., Generator[Step, TrainState | None, None]]
    lag: int = 0


SCHEDULES = registry.PartTable("schedule", Schedule)
schedule = SCHEDULES.enter


def make(name: str, **hyper: Any) -> Schedule:
    """The schedule of that name, or of your own "module:function"; ValueError for an unknown name or keyword."""
    return SCHEDULES.make(name, **hyper)

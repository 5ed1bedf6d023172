"""Sampling and learning in turns: each batch is sampled with the weights that it updates."""
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxrl_llm.data.finished import Finished
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.schedules.base import BatchSource, Schedule, Step, schedule
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.tools.timer import PhaseTimer


@schedule
def sync() -> Schedule:
    """One batch after the other; nothing is pending between two steps.

    Raises `engines.server.Mismatch` for a batch of a server whose log-probs differ too much from the learner's.
    """
    return Schedule(steps)


def steps(source: BatchSource, learner: Learner, state: TrainState, frozen: Mapping[str, Any] | None = None,
          timer: PhaseTimer | None = None, phase: Callable[[str], None] = lambda name: None,
          pending: tuple[Finished, ...] = ()) -> Generator[Step, TrainState | None, None]:
    """The steps of `sync`, see `Schedule`."""
    assert not pending, "no batch waits between two steps"
    while True:
        phase("sampling")
        finished = source.next(learner.publish(state), timer)
        position = source.position()
        phase("learning")
        learned = learner.learn(state, finished.rollouts, frozen, timer, finished.facts, finished.replayed)
        source.stream.kind.check(learned.metrics)
        state = (yield Step(position, finished, learned)) or learned.state
        del finished, learned  # frees memory for the next ones

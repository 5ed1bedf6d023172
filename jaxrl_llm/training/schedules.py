"""Schedules of sampling and learning."""
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.training.learner import Learned, Learner
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.source import Finished, Source
from jaxrl_llm.training.state import TrainState


class Step(NamedTuple):
    """A finished step: the `position` of the source where the run continues, and the results of sampling and learning."""

    position: dict[str, Any]
    finished: Finished
    learned: Learned


def sync(source: Source, learner: Learner, state: TrainState, frozen: Mapping[str, Any] | None = None,
         timer: PhaseTimer | None = None, phase: Callable[[str], None] = lambda name: None
         ) -> Generator[Step, TrainState | None, None]:
    """An endless generator of steps: each batch is sampled with the weights that it updates.

    It calls `phase("sampling")`, then `phase("learning")`. A state sent into the generator replaces the yielded one. Raises
    `external.Mismatch` for a batch of a server whose log-probs differ too much from the learner's.
    """
    while True:
        phase("sampling")
        finished = source.next(state, timer, learner.controls.settings(state.control))
        position = source.position()
        phase("learning")
        learned = learner.learn(state, finished.rollouts, frozen, timer, finished.facts)
        if source.server is not None:
            source.server.check(learned.metrics)
        state = (yield Step(position, finished, learned)) or learned.state
        del finished, learned  # frees memory for the next ones

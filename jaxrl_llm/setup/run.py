"""A configured run."""
import dataclasses

import optax
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.sampling import asked
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stages import moments


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a configured run. `config` has the method's numbers filled in; `needs` are the fields that it reads."""

    config: ConfigDict
    method: methods.Method
    source: Source
    learner: Learner
    learning_rate: optax.Schedule
    needs: frozenset[str]
    schedule: schedules.Schedule

    @property
    def reads(self) -> dict[str, tuple[Knob, ...]]:
        """The knobs that each part of the run reads, by the words for the part."""
        return {**moments.reads(self.source), "the learner": self.learner.reads, "a measure between steps": asked.READS}

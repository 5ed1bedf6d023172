"""A configured run."""
import dataclasses

import optax
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.sampling.source import Source


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

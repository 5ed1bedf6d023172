"""Reinforcement learning of language models in JAX: the names that most code needs, each imported when it is first used."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm import advantages, methods, objectives, setup
    from jaxrl_llm.data.forest import Forest
    from jaxrl_llm.data.rollouts import Rollouts
    from jaxrl_llm.learning import schedules
    from jaxrl_llm.learning.learner import Learner
    from jaxrl_llm.learning.snapshot import Snapshot
    from jaxrl_llm.runs.loop import train
    from jaxrl_llm.sampling.source import Source
    from jaxrl_llm.setup.config import default_config

__all__ = ["Forest", "Learner", "Rollouts", "Snapshot", "Source", "advantages", "default_config", "methods", "objectives",
           "schedules", "setup", "train"]
_PLACES = {  # as above: the module, and the name in it
    "Forest": "jaxrl_llm.data.forest:Forest", "Learner": "jaxrl_llm.learning.learner:Learner",
    "Rollouts": "jaxrl_llm.data.rollouts:Rollouts", "Snapshot": "jaxrl_llm.learning.snapshot:Snapshot",
    "Source": "jaxrl_llm.sampling.source:Source", "advantages": "jaxrl_llm.advantages",
    "default_config": "jaxrl_llm.setup.config:default_config", "methods": "jaxrl_llm.methods",
    "objectives": "jaxrl_llm.objectives", "schedules": "jaxrl_llm.learning.schedules", "setup": "jaxrl_llm.setup",
    "train": "jaxrl_llm.runs.loop:train",
}

if not TYPE_CHECKING:
    def __getattr__(name: str) -> Any:
        """A name of the face. It is imported when it is first used: sandboxes and workers import this package without JAX."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place, _, attribute = _PLACES[name].partition(":")
        module = importlib.import_module(place)
        found = globals()[name] = getattr(module, attribute) if attribute else module
        return found


def __dir__() -> list[str]:
    """Its names for a prompt that completes them, those that are not loaded yet included."""
    return sorted({*globals(), *__all__})

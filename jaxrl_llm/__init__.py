"""Reinforcement learning of language models in JAX: the names that most code needs, each imported when it is first used."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm import advantages, methods, objectives
    from jaxrl_llm.forest import Forest
    from jaxrl_llm.rollouts import Rollouts
    from jaxrl_llm.training import schedules, setup
    from jaxrl_llm.training.config import default_config
    from jaxrl_llm.training.learner import Learner
    from jaxrl_llm.training.loop import train
    from jaxrl_llm.training.snapshot import Snapshot
    from jaxrl_llm.training.source import Source

__all__ = ["Forest", "Learner", "Rollouts", "Snapshot", "Source", "advantages", "default_config", "methods", "objectives",
           "schedules", "setup", "train"]
_PLACES = {  # as above: the module, and the name in it
    "Forest": "jaxrl_llm.forest:Forest", "Learner": "jaxrl_llm.training.learner:Learner",
    "Rollouts": "jaxrl_llm.rollouts:Rollouts", "Snapshot": "jaxrl_llm.training.snapshot:Snapshot",
    "Source": "jaxrl_llm.training.source:Source", "advantages": "jaxrl_llm.advantages",
    "default_config": "jaxrl_llm.training.config:default_config", "methods": "jaxrl_llm.methods",
    "objectives": "jaxrl_llm.objectives", "schedules": "jaxrl_llm.training.schedules", "setup": "jaxrl_llm.training.setup",
    "train": "jaxrl_llm.training.loop:train",
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

"""From a configuration to a run: its keys, its parts by name, the model it starts with, and what it refuses."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.setup.learners import make_learner
    from jaxrl_llm.setup.run import Run
    from jaxrl_llm.setup.setup import build, initial_state

_PLACES = {"Run": "run", "build": "setup", "initial_state": "setup", "make_learner": "learners"}
__all__ = ["Run", "build", "initial_state", "make_learner"]

if not TYPE_CHECKING:
    def __getattr__(name: str) -> Any:
        """A name whose module is imported when it is first used: keys and recipes load without it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"jaxrl_llm.setup.{_PLACES[name]}"), name)

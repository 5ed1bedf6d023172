"""Environments: conversations that answer and reward. `make` one by name; `runner.Runner` plays many at once."""
import functools
import importlib
import importlib.metadata
import warnings

from jaxrl_llm.environments.base import ENVIRONMENTS, Environment, Message, Rubbish, Turn, environment, key_of
from jaxrl_llm.environments.of_methods import of_methods
from jaxrl_llm.tools import registry

__all__ = ["ENVIRONMENTS", "Environment", "Message", "Rubbish", "Turn", "environment", "factories", "key_of", "make",
           "of_methods"]

registry.discover(__name__, __path__)


@functools.cache
def factories() -> registry.PartTable:
    """All environments by name: those of this room and of `contrib`, and those that installed packages have as entry points.

    `contrib` is above this room and is read when a name is looked up. An entry point of the group `jaxrl_llm.environments`
    names a function whose parameters are keyword-only. A warning names those that are left out, because they cannot be loaded
    or another environment has their name.
    """
    registry.discover("jaxrl_llm.contrib", importlib.import_module("jaxrl_llm.contrib").__path__)
    for point in importlib.metadata.entry_points(group="jaxrl_llm.environments"):
        try:
            ENVIRONMENTS.enter(point.load(), name=point.name)
        except Exception as error:  # a faulty package takes no other environment with it
            warnings.warn(f"the environment {point.name!r} of {point.value} is left out: {type(error).__name__}: {error}",
                          RuntimeWarning, stacklevel=2)
    return ENVIRONMENTS


def make(target: str, /, **options) -> Environment:
    """The environment of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, or if your function returns something else.
    """
    return factories().make(target, **options)

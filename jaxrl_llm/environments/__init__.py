"""Environments: conversations that answer and reward. `make` one by name; `runner.Runner` plays many at once."""
import functools
import importlib
import importlib.metadata
import warnings

from jaxrl_llm.environments.base import Environment, Message, Rubbish, Turn, key_of
from jaxrl_llm.environments.guess_number import guess_number
from jaxrl_llm.environments.memory_use import memory_use
from jaxrl_llm.environments.of_methods import methods_of, of_methods
from jaxrl_llm.environments.purified import purified
from jaxrl_llm.environments.ranked_list import ranked_list
from jaxrl_llm.environments.recent import recent
from jaxrl_llm.environments.sequence import sequence
from jaxrl_llm.environments.single import single
from jaxrl_llm.environments.skill_chain import skill_chain
from jaxrl_llm.environments.solver_verifier import solver_verifier
from jaxrl_llm.environments.tic_tac_toe import tic_tac_toe
from jaxrl_llm.environments.tool_use import tool_use
from jaxrl_llm.environments.treasure import treasure
from jaxrl_llm.tools import registry

__all__ = ["FACTORIES", "Environment", "Message", "Rubbish", "Turn", "factories", "key_of", "make", "of_methods"]

# Environments of other packages, each a file of `contrib`, which is above this room: it is read when a name is looked up.
ADAPTERS = ("gymnasium_text", "gymnax_game", "jumanji_game", "mcp_tools", "openenv_server", "pgx_game", "textarena_game",
            "tinker_cookbook_env", "verifiers_env")
FACTORIES: dict[str, registry.Factory] = {}
for _factory in (single, sequence, tool_use, memory_use, recent, purified, solver_verifier, skill_chain, ranked_list,
                 guess_number, treasure, tic_tac_toe, methods_of):
    registry.register(FACTORIES, "environment", _factory)


@functools.cache
def factories() -> dict[str, registry.Factory]:
    """All environments by name: those of this room and of `contrib`, and those that installed packages have as entry points.

    An entry point of the group `jaxrl_llm.environments` names a function whose parameters are keyword-only. A warning names
    those that are left out, because they cannot be loaded or another environment has their name.
    """
    for name in ADAPTERS:
        registry.register(FACTORIES, "environment", getattr(importlib.import_module(f"jaxrl_llm.contrib.{name}"), name))
    for point in importlib.metadata.entry_points(group="jaxrl_llm.environments"):
        try:
            registry.register(FACTORIES, "environment", point.load(), name=point.name)
        except Exception as error:  # a faulty package takes no other environment with it
            warnings.warn(f"the environment {point.name!r} of {point.value} is left out: {type(error).__name__}: {error}",
                          RuntimeWarning, stacklevel=2)
    return FACTORIES


def make(target: str, /, **options) -> Environment:
    """The environment of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, or if your function returns something else.
    """
    return registry.make(factories(), "environment", target, options, Environment)

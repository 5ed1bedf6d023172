"""Conversations with something that answers and rewards. `make` an environment by name; `runner.Runner` plays many at once."""
import importlib

from jaxrl_llm import registry
from jaxrl_llm.environments.base import Environment, Message, Rubbish, Turn, key_of, replay
from jaxrl_llm.environments.guess_number import guess_number
from jaxrl_llm.environments.gymnasium_text import gymnasium_text
from jaxrl_llm.environments.gymnax_game import gymnax_game
from jaxrl_llm.environments.jumanji_game import jumanji_game
from jaxrl_llm.environments.memory_use import memory_use
from jaxrl_llm.environments.of_methods import of_methods
from jaxrl_llm.environments.pgx_game import pgx_game
from jaxrl_llm.environments.purified import purified
from jaxrl_llm.environments.ranked_list import ranked_list
from jaxrl_llm.environments.recent import recent
from jaxrl_llm.environments.single import single
from jaxrl_llm.environments.skill_chain import skill_chain
from jaxrl_llm.environments.solver_verifier import solver_verifier
from jaxrl_llm.environments.textarena_game import textarena_game
from jaxrl_llm.environments.tic_tac_toe import tic_tac_toe
from jaxrl_llm.environments.tool_use import tool_use
from jaxrl_llm.environments.treasure import treasure

__all__ = ["FACTORIES", "Environment", "Message", "Rubbish", "Turn", "key_of", "make", "of_methods", "replay"]

FACTORIES: dict[str, registry.Factory] = {}
for _factory in (single, tool_use, memory_use, recent, purified, solver_verifier, skill_chain, ranked_list, guess_number,
                 treasure, tic_tac_toe, gymnasium_text, textarena_game, pgx_game, gymnax_game, jumanji_game):
    registry.register(FACTORIES, "environment", _factory)


def make(target: str, **options) -> Environment:
    """The environment of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, TypeError where a function of yours returns
    something else.
    """
    module, colon, function = target.partition(":")
    if not colon:
        return registry.make(FACTORIES, "environment", target, options)
    found = getattr(importlib.import_module(module), function)(**options)
    if not isinstance(found, Environment):
        raise TypeError(f"{target} returned a {type(found).__name__}; it must return an Environment "
                        "(`of_methods` makes one of a class with tools)")
    return found

"""Environments: conversations that answer and reward. `make` one by name; `runner.Runner` plays many at once."""
from jaxrl_llm import registry
from jaxrl_llm.environments.base import Environment, Message, Rubbish, Turn, key_of, replay
from jaxrl_llm.environments.guess_number import guess_number
from jaxrl_llm.environments.gymnasium_text import gymnasium_text
from jaxrl_llm.environments.gymnax_game import gymnax_game
from jaxrl_llm.environments.jumanji_game import jumanji_game
from jaxrl_llm.environments.mcp_tools import mcp_tools
from jaxrl_llm.environments.memory_use import memory_use
from jaxrl_llm.environments.of_methods import of_methods
from jaxrl_llm.environments.openenv_server import openenv_server
from jaxrl_llm.environments.pgx_game import pgx_game
from jaxrl_llm.environments.purified import purified
from jaxrl_llm.environments.ranked_list import ranked_list
from jaxrl_llm.environments.recent import recent
from jaxrl_llm.environments.sequence import sequence
from jaxrl_llm.environments.single import single
from jaxrl_llm.environments.skill_chain import skill_chain
from jaxrl_llm.environments.solver_verifier import solver_verifier
from jaxrl_llm.environments.textarena_game import textarena_game
from jaxrl_llm.environments.tic_tac_toe import tic_tac_toe
from jaxrl_llm.environments.tinker_cookbook_env import tinker_cookbook_env
from jaxrl_llm.environments.tool_use import tool_use
from jaxrl_llm.environments.treasure import treasure
from jaxrl_llm.environments.verifiers_env import verifiers_env

__all__ = ["FACTORIES", "Environment", "Message", "Rubbish", "Turn", "key_of", "make", "of_methods", "replay"]

FACTORIES: dict[str, registry.Factory] = {}
for _factory in (single, sequence, tool_use, memory_use, recent, purified, solver_verifier, skill_chain, ranked_list,
                 guess_number, treasure, tic_tac_toe, gymnasium_text, textarena_game, pgx_game, gymnax_game, jumanji_game,
                 mcp_tools, openenv_server, tinker_cookbook_env, verifiers_env):
    registry.register(FACTORIES, "environment", _factory)


def make(target: str, **options) -> Environment:
    """The environment of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, or if your function returns something else.
    """
    return registry.make(FACTORIES, "environment", target, options, Environment)

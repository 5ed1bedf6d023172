"""Games of TextArena for one player (arXiv 2504.11442)."""
import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.environments.base import Environment, Message, Turn
from jaxrl_llm.tasks.base import Problem, optional, seeded

_CHANCE = threading.Lock()  # its games draw from the random numbers that the whole process shares


@dataclasses.dataclass
class Played:
    """A game, the state of its random numbers, and how many messages the policy may still send."""

    inside: Any
    left: int
    chance: tuple = ()


def textarena_game(*, game: str = "GuessTheNumber-v0", turns: int = 50, problems: int = 1000,
                   heldout: int = 200) -> Environment:
    """A game of TextArena by its id. A problem is a seed of `reset`; chance during the trajectory is the key's.

    The return is the game's own reward, or 0 where `turns` end before it. Raises ValueError without textarena, for an unknown
    game, and for one that needs more players.
    """
    textarena = optional("textarena", "environments")

    def open_game(seed: int) -> Any:
        try:
            inside = textarena.make(f"{game}-raw")
        except ValueError as error:
            raise ValueError(f"textarena has no game {game!r}: {error}") from error
        try:
            inside.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ValueError(f"{game} is no game for one player: {error}") from error
        return inside

    def reset(problem: Problem, key: int) -> tuple[Played, list[Message]]:
        state = Played(None, turns)
        with _chance_of(state):
            _seed(problem.extra["seed"])
            state.inside = open_game(problem.extra["seed"])
            _seed(key)
        return state, _messages(state.inside)

    with _chance_of(Played(None, 0)):
        open_game(0)
    return Environment(name=game, task=seeded(f"textarena/{game}", game, problems, heldout), reset=reset, step=_step,
                       returns=(-1.0, 1.0))


def _step(state: Played, message: Message) -> Turn:
    state.left -= 1
    with _chance_of(state):
        done, _ = state.inside.step(message["content"])
        if done:
            rewards, facts = state.inside.close()
            return Turn(reward=rewards[0], done=True, info={"invalid_move": bool(facts[0].get("invalid_move"))})
    return Turn(_messages(state.inside) or [{"role": "user", "content": "(nothing)"}], done=state.left <= 0)


def _messages(inside: Any) -> list[Message]:
    """What the game has said since it was last asked; not what the player said."""
    player, seen = inside.get_observation()
    text = "\n".join(text for author, text, _ in seen if author != player)
    return [{"role": "user", "content": text}] if text else []


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)


@contextlib.contextmanager
def _chance_of(state: Played) -> Iterator[None]:
    """The shared random numbers are those of this game; afterwards they are as they were."""
    with _CHANCE:
        outside = random.getstate(), np.random.get_state()
        if state.chance:
            _restore(state.chance)
        try:
            yield
        finally:
            state.chance = random.getstate(), np.random.get_state()
            _restore(outside)


def _restore(chance: tuple) -> None:
    random.setstate(chance[0])
    np.random.set_state(chance[1])

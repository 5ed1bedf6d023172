"""Environments of gymnax as text, in one compiled program (github.com/RobertTLange/gymnax)."""
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.environments.base import Environment, environment
from jaxrl_llm.environments.compiled import environment_of
from jaxrl_llm.environments.games import Game, Move
from jaxrl_llm.environments.shortest import shortest_way
from jaxrl_llm.tasks.base import optional, seeded
from jaxrl_llm.tools.registry import one_of

COMPASS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


@dataclasses.dataclass(frozen=True)
class Spoken:
    """The text form of an environment.

    `drawn(env)` makes the function from an observation to text, `perfect(env)` the function to the best word, if there is one.
    `returns`: lowest and highest reward of a message if `each`, else lowest and highest return of a trajectory.
    """

    words: tuple[str, ...]
    rules: str
    drawn: Callable[[Any], Callable[[np.ndarray], str]]
    returns: tuple[float, float]
    each: bool = False
    perfect: Callable[[Any], Callable[[np.ndarray], str]] | None = None


def _numbers(*names: str) -> Callable[[Any], Callable[[np.ndarray], str]]:
    """Observations as names with numbers of three decimals."""
    return lambda env: lambda seen: ", ".join(f"{name} {value:.3f}" for name, value in zip(names, seen.tolist(), strict=True))


def _layers(letters: str) -> Callable[[Any], Callable[[np.ndarray], str]]:
    """A grid f32[rows, columns, layers] as text: each square has the letter of its first nonzero layer."""
    def square(layers: list[float]) -> str:
        return next((letter for letter, there in zip(letters, layers, strict=True) if there), ".")

    return lambda env: lambda seen: "\n".join("".join(map(square, row)) for row in seen.tolist())


def _lake(env: Any) -> list[list[str]]:
    return [["SFHG"[tile] for tile in row] for row in np.asarray(env.desc).tolist()]


def _lake_drawn(env: Any) -> Callable[[np.ndarray], str]:
    rows = _lake(env)

    def text(seen: np.ndarray) -> str:
        here = divmod(int(seen), len(rows[0]))
        return "\n".join("".join(f"[{tile}]" if (i, j) == here else tile for j, tile in enumerate(row))
                         for i, row in enumerate(rows))

    return text


def _lake_way(env: Any) -> Callable[[np.ndarray], str]:
    rows = _lake(env)

    def steps(place: Any) -> Any:
        for word, (down, right) in COMPASS.items():
            row, column = place[0] + down, place[1] + right
            if 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != "H":
                yield word, (row, column)

    return lambda seen: shortest_way(divmod(int(seen), len(rows[0])), lambda at: rows[at[0]][at[1]] == "G", steps)[0]


def _rooms(env: Any) -> Callable[[np.ndarray], str]:
    free = np.asarray(env.env_map).tolist()

    def text(seen: np.ndarray) -> str:
        row, column, goal_row, goal_column = seen.tolist()
        marks = {(goal_row, goal_column): "G", (row, column): "A"}
        return "\n".join("".join(marks.get((i, j), " " if open_ else "#") for j, open_ in enumerate(line))
                         for i, line in enumerate(free))

    return text


def _rooms_way(env: Any) -> Callable[[np.ndarray], str]:
    free = np.asarray(env.env_map)

    def steps(place: Any) -> Any:
        return ((word, (place[0] + down, place[1] + right)) for word, (down, right) in COMPASS.items()
                if free[place[0] + down, place[1] + right])

    return lambda seen: shortest_way((int(seen[0]), int(seen[1])), lambda at: at == (int(seen[2]), int(seen[3])), steps)[0]


def _caught(env: Any) -> Callable[[np.ndarray], str]:
    """The move towards the ball's column: the ball is the upper of two marks, or both marks coincide."""
    def move(seen: np.ndarray) -> str:
        paddle, ball = int(np.argmax(seen[-1])), int(np.argmax(seen[np.argmax(seen.any(axis=1))]))
        return ("left", "stay", "right")[int(np.sign(ball - paddle)) + 1]

    return move


def _catch_drawn(env: Any) -> Callable[[np.ndarray], str]:
    def text(seen: np.ndarray) -> str:
        rows = [["o" if there else "." for there in row] for row in seen.tolist()]
        rows[-1] = ["_" if square == "o" else square for square in rows[-1]]
        return "\n".join(map("".join, rows))

    return text


SPOKEN = {
    "FrozenLake-misc": Spoken(
        ("left", "down", "right", "up"), "Walk on the ice from S to G without falling into a hole H. You are on the square in "
        "brackets. Answer with left, down, right or up.", _lake_drawn, (0.0, 1.0), perfect=_lake_way),
    "FourRooms-misc": Spoken(
        ("up", "right", "down", "left"), "Walk from A to G; # are walls. Answer with up, right, down or left.", _rooms,
        (0.0, 1.0), perfect=_rooms_way),
    "Catch-bsuite": Spoken(
        ("left", "stay", "right"), "A ball o falls by one row a move. Catch it with the paddle _ in the last row. Answer with "
        "left, stay or right.", _catch_drawn, (-1.0, 1.0), perfect=_caught),
    "Breakout-MinAtar": Spoken(
        ("stay", "left", "right"), "Break the bricks # with the ball o, which leaves the trail ' behind it, and keep it from "
        "falling with the paddle _. Answer with stay, left or right.", _layers("_o'#"), (0.0, 1.0), each=True),
    "CartPole-v1": Spoken(
        ("left", "right"), "Push the cart so that its pole does not fall over. Answer with left or right.",
        _numbers("position", "speed", "angle", "turning"), (0.0, 1.0), each=True),
    "MountainCar-v0": Spoken(
        ("left", "coast", "right"), "Drive the car out of the valley, to position 0.5. Answer with left, coast or right.",
        _numbers("position", "speed"), (-1.0, 0.0), each=True),
}


@environment
def gymnax_game(*, game: str = "FrozenLake-misc", settings: Mapping[str, Any] | None = None,
                params: Mapping[str, Any] | None = None, brief: bool = False, turns: int = 100, problems: int = 1000,
                heldout: int = 200) -> Environment:
    """An environment of gymnax: FrozenLake-misc, FourRooms-misc, Catch-bsuite, Breakout-MinAtar, CartPole-v1, MountainCar-v0.

    `settings` are arguments of its constructor (`{"is_slippery": False}`), `params` parameters of its rules
    (`{"fail_prob": 0.0}`). A problem is the seed of the initial state; later chance comes from the trajectory's key. Every
    action is legal; after a message without an action the policy is asked again. `brief` shows only the state. Games without
    chance have oracles. Raises ValueError without gymnax, for a game that is not listed, and for unknown settings.
    """
    one_of("game of gymnax", game, tuple(SPOKEN))
    gymnax, spoken = optional("gymnax", "gymnax"), SPOKEN[game]
    env, rules = gymnax.make(game)
    try:
        env, _ = gymnax.make(game, **(settings or {}))
        rules = rules.replace(**(params or {}))
    except TypeError as error:
        raise ValueError(f"{game} with settings={dict(settings or {})}, params={dict(params or {})}: {error}; its params are "
                         f"{', '.join(vars(rules))}") from error
    chance = getattr(env, "is_slippery", False) or getattr(rules, "fail_prob", 0.0) > 0
    oracle = spoken.perfect(env) if spoken.perfect is not None and not chance else None
    times = turns if spoken.each else 1
    return environment_of(
        _played(game, json.dumps(settings or {}), json.dumps(params or {}), brief, turns), name=game,
        task=seeded(f"gymnax/{game}", spoken.rules, problems, heldout), oracle=oracle,
        returns=(spoken.returns[0] * times, spoken.returns[1] * times))


@functools.cache  # equal options return the same functions, which are compiled once
def _played(game: str, settings: str, params: str, brief: bool, turns: int) -> Game:
    import gymnax

    spoken = SPOKEN[game]
    env, rules = gymnax.make(game, **json.loads(settings))
    rules = rules.replace(**json.loads(params))

    def step(state: Sequence[Any], action: jax.Array, key: jax.Array) -> tuple[Any, Move]:
        seen, after, reward, done, _ = env.step_env(key, state[1], action, rules)
        return (seen, after), Move(jnp.asarray(reward, jnp.float32), jnp.asarray(done, bool))

    return Game(words=spoken.words, reset=lambda key, heldout: jax.tree.map(jnp.asarray, env.reset_env(key, rules)), step=step,
                legal=lambda state: jnp.ones(len(spoken.words), bool), seen=lambda state: state[0], text=spoken.drawn(env),
                rules=spoken.rules, turns=turns, brief=brief)

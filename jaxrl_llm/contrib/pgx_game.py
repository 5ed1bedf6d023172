"""Games of pgx, for one player or two, in one compiled program (Koyamada et al., arXiv 2303.17503)."""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.environments.base import Environment, environment
from jaxrl_llm.environments.compiled import environment_of
from jaxrl_llm.environments.games import Game, Move, chosen
from jaxrl_llm.environments.tic_tac_toe import best_move
from jaxrl_llm.tasks.base import optional, seeded
from jaxrl_llm.tools.registry import one_of

GOAL = 11  # the tile 2048 is 2 to this power
SIDES = "XO"


class Seat(NamedTuple):
    """A game for two: pgx's state, the player who moved first, and whether the other side moves at random."""

    inside: Any
    first: jax.Array
    alone: jax.Array


class Board(NamedTuple):
    """What players see: bool[rows, columns, 2] stones of the side to move and of the other, i32[] side to move.

    In a game that hides something, `stones` is what the side to move observes.
    """

    stones: jax.Array
    side: jax.Array


@dataclasses.dataclass(frozen=True)
class BoardText:
    """The text form of a board for two players: words of the actions, rules, and the drawing with its labels.

    `hidden`: players see different things, and `drawn` takes what the one that moves observes instead of squares. `most` is the
    largest return.
    """

    words: tuple[str, ...]
    rules: str
    drawn: Callable[[Any], str]
    hidden: bool = False
    most: float = 1.0


def _numbered(rows: list[list[str]]) -> str:
    return "\n".join("".join(str(len(rows) * i + j + 1) if square == "." else square for j, square in enumerate(row))
                     for i, row in enumerate(rows))


def _columns(rows: list[list[str]]) -> str:
    return "\n".join(["".join(str(j + 1) for j in range(len(rows[0]))), *map("".join, rows)])


def _lettered(rows: list[list[str]]) -> str:
    return "\n".join(["  " + "".join("abcdefgh"[:len(rows)]), *(f"{i + 1} {''.join(row)}" for i, row in enumerate(rows))])


def _hand(observation: Any) -> str:
    card, mine, others = (int(np.argmax(part)) for part in np.split(np.asarray(observation), [3, 5]))
    return f"Your card is {'JQK'[card]}. You have bet {mine}, the other player {others}."


SHAPES = {
    "tic_tac_toe": BoardText(
        tuple(str(i + 1) for i in range(9)), "This is tic-tac-toe. Free squares have a number. Answer with the number of the "
        "square that you take. Three in a row win; a square that is not free loses.", _numbered),
    "connect_four": BoardText(
        tuple(str(i + 1) for i in range(7)), "This is connect four. Answer with the number of the column that you drop a stone "
        "into. Four in a row win; a column that is full loses.", _columns),
    "othello": BoardText(
        tuple(f"{column}{row}" for row in range(1, 9) for column in "abcdefgh") + ("pass",),
        "This is Othello. Answer with the square that you take, a letter and a number, or with pass where you cannot take one. "
        "More stones at the end win; a move that turns none loses.", _lettered),
    "kuhn_poker": BoardText(
        ("bet", "pass"), "This is Kuhn poker. Each player has paid a chip and has one of the cards J, Q and K, which the other "
        "one does not see. Answer with bet or pass. To bet pays a chip more, or as much as the other player; to pass after a "
        "bet of the other player gives up. If no one gives up, the higher card wins.", _hand, hidden=True, most=2.0),
}


@environment
def pgx_game(*, game: str = "tic_tac_toe", selfplay: bool = False, opening: int = 2, brief: bool = False, turns: int = 100,
             problems: int = 1000, heldout: int = 200) -> Environment:
    """A game of pgx: tic_tac_toe, connect_four, othello and kuhn_poker for two, 2048 for one.

    Games for two begin with up to `opening` random moves, drawn from the problem's seed. The policy plays the side that moves
    next, and the other side moves at random by the trajectory's key; the reward is 1, 0 or -1, and in poker the chips. With
    `selfplay` the policy plays both sides of training problems: the reward is 0, and the returns of agents 0 (X, who moved
    first) and 1 (O) are in the info of the last turn (`returns`). A message without a legal move loses. Poker begins with at
    most one random move, and each agent has a context of its own.

    In 2048 the return is the growth of the logarithm of the largest tile as a share of the logarithm of 2048, where the game is
    won. `brief` shows only the board. Raises ValueError without pgx, or for a game that is not listed.
    """
    one_of("game of pgx", game, (*SHAPES, "2048"))
    optional("pgx", "environments")
    task = seeded(f"pgx/{game}", SHAPES[game].rules if game in SHAPES else RULES_2048, problems, heldout)
    if game == "2048":
        return environment_of(_merged(brief, turns), name=game, task=task, returns=(0.0, 1.0))
    oracle = _perfect if game == "tic_tac_toe" else None
    return environment_of(_for_two(game, selfplay, opening, brief, turns), name=game, task=task,
                          returns=(-SHAPES[game].most, SHAPES[game].most),
                          facts={"agent": "turn", "functional_group": "turn", "game": "once"}, oracle=oracle)


# --- two players ----------------------------------------------------------------------------------------------------------


@functools.cache  # equal options return the same functions, which are compiled once
def _for_two(game: str, selfplay: bool, opening: int, brief: bool, turns: int) -> Game:
    import pgx

    env, shape = pgx.make(game), SHAPES[game]
    moves_before = min(opening, 1) if shape.hidden else opening

    def reset(key: jax.Array, heldout: jax.Array) -> Seat:
        begin, how_many, moves = jax.random.split(key, 3)
        begun = env.init(begin)
        state = jax.lax.fori_loop(
            0, jax.random.randint(how_many, (), 0, moves_before + 1),
            lambda number, state: env.step(state, _any_legal(state, jax.random.fold_in(moves, number))), begun)
        return Seat(state, begun.current_player, jnp.logical_not(selfplay) | heldout)

    def made(seat: Seat, before: Any, rewards: jax.Array, done: jax.Array) -> Move:
        mine = (before.current_player != seat.first).astype(jnp.int32)
        reward = jnp.where(seat.alone, rewards[before.current_player], 0.0)
        agents = jnp.stack([rewards[seat.first], rewards[1 - seat.first]])
        return Move(reward, done, {"agent": mine, "functional_group": mine, "game": jnp.int32(0), "returns": agents})

    def step(seat: Seat, action: jax.Array, key: jax.Array) -> tuple[Seat, Move]:
        own = env.step(seat.inside, action)
        answered = env.step(own, _any_legal(own, key))
        answers = seat.alone & ~own.terminated
        after = chosen(answers, answered, own)
        rewards = own.rewards + jnp.where(answers, answered.rewards, 0.0)
        return seat._replace(inside=after), made(seat, seat.inside, rewards, after.terminated)

    def forfeit(seat: Seat) -> Move:
        lost = jnp.ones(2).at[seat.inside.current_player].set(-1.0)
        return made(seat, seat.inside, lost, jnp.bool_(True))

    def seen(seat: Seat) -> Board:
        return Board(seat.inside.observation, (seat.inside.current_player != seat.first).astype(jnp.int32))

    def text(board: Board) -> str:
        side, drawn = SIDES[int(board.side)], shape.drawn(board.stones if shape.hidden else _squares(board))
        return f"{drawn}\n{side}" if brief else f"{drawn}\n\nYou are {side}."

    return Game(words=shape.words, reset=reset, step=step, legal=lambda seat: seat.inside.legal_action_mask, seen=seen,
                text=text, rules=shape.rules, turns=turns, forfeit=forfeit, brief=brief,
                reader=(lambda board: int(board.side)) if shape.hidden else None)


def _any_legal(state: Any, key: jax.Array) -> jax.Array:
    """A uniformly random legal action."""
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf)).astype(jnp.int32)


def _squares(board: Board) -> list[list[str]]:
    """X, O or a point for each square."""
    mine, other = SIDES[int(board.side)], SIDES[1 - int(board.side)]
    return [[mine if own else other if theirs else "." for own, theirs in row] for row in np.asarray(board.stones).tolist()]


def _perfect(board: Board) -> str:
    """The best square of tic-tac-toe."""
    return str(best_move("".join(map("".join, _squares(board)))) + 1)


# --- 2048 -----------------------------------------------------------------------------------------------------------------


RULES_2048 = ("This is 2048. Answer with left, up, right or down: all tiles move there, and two equal ones that meet become "
              "one. Make the tile 2048.")


@functools.cache
def _merged(brief: bool, turns: int) -> Game:
    import pgx

    env = pgx.make("2048")

    def largest(state: Any) -> jax.Array:
        return jnp.max(jnp.argmax(state.observation, axis=-1))

    def step(state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Move]:
        after = env.step(state, action, key)
        grown = (largest(after) - largest(state)) / GOAL
        return after, Move(grown.astype(jnp.float32), after.terminated | (largest(after) >= GOAL))

    def text(powers: Any) -> str:
        width = 1 if brief else 4
        return "\n".join(" ".join(f"{2 ** tile if tile else '.':>{width}}" for tile in row)
                         for row in np.asarray(powers).tolist())

    return Game(words=("left", "up", "right", "down"), reset=lambda key, heldout: env.init(key), step=step,
                legal=lambda state: state.legal_action_mask, seen=lambda state: jnp.argmax(state.observation, axis=-1),
                text=text, rules=RULES_2048, turns=turns, brief=brief)

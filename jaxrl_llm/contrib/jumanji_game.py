"""Puzzles of Jumanji as text, in one compiled program (Bonnet et al., arXiv 2306.09884)."""
import dataclasses
import functools
from collections.abc import Callable
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

COMPASS = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}  # in the order of Jumanji's actions
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """The text form of a puzzle.

    `make(size)` is its Jumanji environment, `shape(size)` the shape of its actions, `word(action)` the name of an action, given
    by one number per axis. `worth(size)` is the sum of the rewards of a solution. `perfect(seen) -> word` is a best move.
    """

    make: Callable[[int], Any]
    shape: Callable[[int], tuple[int, ...]]
    word: Callable[[tuple[int, ...]], str]
    rules: str
    text: Callable[[Any], str]
    size: int
    worth: Callable[[int], float] = lambda size: 1.0
    perfect: Callable[[Any], str] | None = None


def _square(place: tuple[int, ...]) -> str:
    """The name of a square: a letter for its column, a number for its row."""
    return f"{LETTERS[place[1]]}{place[0] + 1}"


def _compass(size: int) -> tuple[int, ...]:
    return (len(COMPASS),)


def _direction(place: tuple[int, ...]) -> str:
    return list(COMPASS)[place[0]]


def _framed(rows: list[str]) -> str:
    """A board with the names of its columns and rows."""
    wide = len(str(len(rows)))
    return "\n".join([f"{'':{wide}} {LETTERS[:len(rows[0])]}", *(f"{i + 1:>{wide}} {row}" for i, row in enumerate(rows))])


# --- maze -----------------------------------------------------------------------------------------------------------------


def _maze(size: int) -> Any:
    from jumanji.environments.routing.maze import Maze
    from jumanji.environments.routing.maze.generator import RandomGenerator

    return Maze(generator=RandomGenerator(num_rows=size, num_cols=size), time_limit=10**6)


def _maze_text(seen: Any) -> str:
    marks = {(int(seen.target_position.row), int(seen.target_position.col)): "G",
             (int(seen.agent_position.row), int(seen.agent_position.col)): "A"}
    return "\n".join("".join(marks.get((i, j), "#" if wall else ".") for j, wall in enumerate(row))
                     for i, row in enumerate(np.asarray(seen.walls).tolist()))


def _maze_way(seen: Any) -> str:
    walls = np.pad(np.asarray(seen.walls), 1, constant_values=True)
    end = int(seen.target_position.row), int(seen.target_position.col)

    def steps(place: Any) -> Any:
        return ((word, (place[0] + down, place[1] + right)) for word, (down, right) in COMPASS.items()
                if not walls[place[0] + down + 1, place[1] + right + 1])

    return shortest_way((int(seen.agent_position.row), int(seen.agent_position.col)), lambda at: at == end, steps)[0]


# --- sliding tiles --------------------------------------------------------------------------------------------------------


def _sliding(size: int) -> Any:
    from jumanji.environments.logic.sliding_tile_puzzle import SlidingTilePuzzle
    from jumanji.environments.logic.sliding_tile_puzzle.generator import RandomWalkGenerator
    from jumanji.environments.logic.sliding_tile_puzzle.reward import SparseRewardFn

    return SlidingTilePuzzle(generator=RandomWalkGenerator(grid_size=size, num_random_moves=4 * size),
                             reward_fn=SparseRewardFn(), time_limit=10**6)


def _sliding_text(seen: Any) -> str:
    rows = np.asarray(seen.puzzle).tolist()
    wide = len(str(len(rows) ** 2 - 1))
    return "\n".join(" ".join(f"{tile or '.':>{wide}}" for tile in row) for row in rows)


def _sliding_way(seen: Any) -> str:
    board = np.asarray(seen.puzzle)
    size, start = len(board), tuple(board.ravel().tolist())

    def steps(tiles: Any) -> Any:
        row, column = divmod(tiles.index(0), size)
        for word, (down, right) in COMPASS.items():
            if 0 <= row + down < size and 0 <= column + right < size:
                other, moved = (row + down) * size + column + right, list(tiles)
                moved[row * size + column], moved[other] = moved[other], 0
                yield word, tuple(moved)

    way = shortest_way(start, lambda tiles: tiles == (*range(1, size * size), 0), steps)
    return way[0] if way else "left"  # a puzzle can begin solved: move away, and back


# --- boards of numbers ----------------------------------------------------------------------------------------------------


def _mines(size: int) -> Any:
    from jumanji.environments.logic.minesweeper import Minesweeper
    from jumanji.environments.logic.minesweeper.generator import UniformSamplingGenerator

    return Minesweeper(generator=UniformSamplingGenerator(num_rows=size, num_cols=size, num_mines=_mine_count(size)))


def _mine_count(size: int) -> int:
    return max(size * size // 10, 1)


def _mines_text(seen: Any) -> str:
    rows = ["".join("?" if number < 0 else str(number) for number in row) for row in np.asarray(seen.board).tolist()]
    return f"{_framed(rows)}\nMines: {int(seen.num_mines)}."


def _sudoku(size: int) -> Any:
    import jumanji

    return jumanji.make("Sudoku-very-easy-v0")


def _sudoku_text(seen: Any) -> str:
    return _framed(["".join("." if digit < 0 else str(digit + 1) for digit in row) for row in np.asarray(seen.board).tolist()])


PUZZLES = {
    "Maze-v0": Puzzle(
        _maze, _compass, _direction, "Walk through the maze from A to G; # are walls. Answer "
        "with up, right, down or left.", _maze_text, 5, perfect=_maze_way),
    "SlidingTilePuzzle-v0": Puzzle(
        _sliding, _compass, _direction, "Bring the tiles into their order, row by row, with the gap at the end. Answer with "
        "up, right, down or left: there the gap moves.", _sliding_text, 3, perfect=_sliding_way),
    "Minesweeper-v0": Puzzle(
        _mines, lambda size: (size, size), _square, "Uncover all squares without a mine. A number says how many of its "
        "neighbours are mines. Answer with a square that is covered (?), a letter and a number; a mine ends the game.",
        _mines_text, 5, lambda size: float(size * size - _mine_count(size))),
    "Sudoku-very-easy-v0": Puzzle(
        _sudoku, lambda size: (9, 9, 9), lambda place: f"{_square(place)}={place[2] + 1}", "Fill the squares with digits so "
        "that each row, column and block has all of 1 to 9. Answer with a square and its digit, such as a1=5.", _sudoku_text,
        9),
}


@environment
def jumanji_game(*, game: str = "Maze-v0", size: int = 0, brief: bool = False, turns: int = 100, problems: int = 1000,
                 heldout: int = 200) -> Environment:
    """A puzzle of Jumanji: Maze-v0, SlidingTilePuzzle-v0, Minesweeper-v0 or Sudoku-very-easy-v0.

    `size`: rows and columns of the board; 0: 5 for mazes and mines, 3 for tiles. Sudoku's size is 9. A problem is the seed of
    the puzzle. The return is 1 for a solution; in Minesweeper it is the share of safe squares that were uncovered. A move that
    the rules forbid changes nothing, and the policy is asked again. `brief` shows only the board. Raises ValueError without
    jumanji, for a puzzle that is not listed, and for another size.
    """
    one_of("game of jumanji", game, tuple(PUZZLES))
    optional("jumanji", "environments")
    puzzle = PUZZLES[game]
    size = size or puzzle.size
    if not 2 <= size <= len(LETTERS) or (game.startswith("Sudoku") and size != 9):
        raise ValueError(f"size={size} of {game}; allowed are 2 to {len(LETTERS)}, 9 of Sudoku, 0 for the usual one")
    return environment_of(_played(game, size, brief, turns), name=game, returns=(0.0, 1.0), oracle=puzzle.perfect,
                          task=seeded(f"jumanji/{game}", puzzle.rules, problems, heldout))


@functools.cache  # equal options return the same functions, which are compiled once
def _played(game: str, size: int, brief: bool, turns: int) -> Game:
    puzzle = PUZZLES[game]
    env, shape = puzzle.make(size), puzzle.shape(size)

    def reset(key: jax.Array, heldout: jax.Array) -> tuple[Any, Any]:
        state, first = env.reset(jax.random.key_data(key))
        return state, first.observation

    def step(state: tuple[Any, Any], action: jax.Array, key: jax.Array) -> tuple[Any, Move]:
        place = action if len(shape) == 1 else jnp.stack(jnp.unravel_index(action, shape))
        after, made = env.step(state[0].replace(key=jax.random.key_data(key)), place)
        return (after, made.observation), Move((made.reward / puzzle.worth(size)).astype(jnp.float32), made.last())

    return Game(words=tuple(puzzle.word(place) for place in np.ndindex(*shape)), reset=reset, step=step,
                legal=lambda state: state[1].action_mask.ravel(), seen=lambda state: state[1], text=puzzle.text,
                rules=puzzle.rules, turns=turns, brief=brief)

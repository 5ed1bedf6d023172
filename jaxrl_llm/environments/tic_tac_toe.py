"""Tic-tac-toe in which the policy plays both sides; on held-out problems it plays one side against random moves."""
import dataclasses
import functools
import random
import re

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.words import AFTER_DIGITS, BEFORE_DIGITS
from jaxrl_llm.tasks.base import Problem, disjoint_task, split_position

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
SIDES = "XO"
RULES = ("This is tic-tac-toe. Free squares have a number. Answer with the number of the square that you take. Three in a row "
         "win; a square that is not free loses.")
_MOVE = re.compile(f"{BEFORE_DIGITS}[1-9]{AFTER_DIGITS}")


@dataclasses.dataclass
class TicTacToeState:
    """The board, nine squares of "X", "O" or "."; the random moves of an opponent, None if the policy plays both sides."""

    board: str
    opponent: random.Random | None

    @property
    def side(self) -> int:
        """The side to move: 0 is X, which began, 1 is O."""
        return (9 - self.board.count(".")) % 2


@environment
def tic_tac_toe(*, brief: bool = False, heldout_fraction: float = 0.2) -> Environment:
    """Games from boards with one or two moves made. In training both agents, 0 (X) and 1 (O), are the policy.

    A game of self-play has the reward 0; the return of each agent, 1, 0 or -1, is in the info of its last turn (`returns`). On
    held-out problems the policy is the agent that moves first and the other moves at random; the reward is the policy's.
    `brief` shows only the board, without rules. Raises ValueError for a fraction that leaves training or held-out problems
    empty.
    """
    sides: tuple[list, list] = ([], [])
    for board in _begun():
        sides[split_position(board) < heldout_fraction].append((board, split_position(board) < heldout_fraction))

    def build(item: tuple[str, bool], number: int) -> Problem:
        board, alone = item
        return Problem(({"role": "user", "content": shown(board, brief)},), "", number, extra={"board": board, "alone": alone})

    def reset(problem: Problem, key: int) -> tuple[TicTacToeState, list[Message]]:
        game = TicTacToeState(problem.extra["board"], random.Random(key) if problem.extra["alone"] else None)
        return game, [{"role": "user", "content": shown(game.board, brief)}]

    return Environment(
        name="tic_tac_toe", task=disjoint_task("tic_tac_toe", *sides, build, reward="environment"), reset=reset,
        step=functools.partial(_step, brief=brief), returns=(-1.0, 1.0),
        facts={"agent": "turn", "functional_group": "turn", "game": "once"},
        oracle=lambda game: str(best_move(game.board) + 1), choices=lambda game: [str(i + 1) for i in free(game.board)])


def free(board: str) -> list[int]:
    """Free squares, counted from 0."""
    return [square for square in range(9) if board[square] == "."]


def played(board: str, square: int) -> str:
    """The board after the next move."""
    return board[:square] + SIDES[(9 - board.count(".")) % 2] + board[square + 1:]


def winner(board: str) -> int | None:
    """The side with three in a row, None if neither has them."""
    return next((SIDES.index(board[a]) for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


@functools.cache
def value(board: str) -> int:
    """1, 0 or -1: the return of the side that moves next, if both play perfectly."""
    if winner(board) is not None:
        return -1  # the other side has just won
    return max((-value(played(board, square)) for square in free(board)), default=0)


def best_move(board: str) -> int:
    """The first square of a perfect game."""
    return max(free(board), key=lambda square: -value(played(board, square)))


def shown(board: str, brief: bool) -> str:
    """The text for the player that moves next."""
    squares = "".join(str(i + 1) if square == "." else square for i, square in enumerate(board))
    rows = "\n".join(squares[i:i + 3] for i in (0, 3, 6))
    side = SIDES[(9 - board.count(".")) % 2]
    return f"{rows}\n{side}" if brief else f"{RULES}\n\n{rows}\n\nYou are {side}."


def _begun() -> list[str]:
    """All boards after one move and after two."""
    one = [played("." * 9, square) for square in range(9)]
    return [*one, *(played(board, square) for board in one for square in free(board))]


def _step(game: TicTacToeState, message: Message, *, brief: bool) -> Turn:
    mine, moves = game.side, _MOVE.findall(message["content"])
    info = {"agent": mine, "functional_group": mine, "game": 0, "state": game.board, "action": moves[-1] if moves else ""}
    square = int(moves[-1]) - 1 if moves else None
    if square is None or game.board[square] != ".":
        return _ended(game, info, 1 - mine, mine, {"invalid_move": True})
    game.board = played(game.board, square)
    if game.opponent is not None and winner(game.board) is None and free(game.board):
        game.board = played(game.board, game.opponent.choice(free(game.board)))
    won = winner(game.board)
    if won is not None or not free(game.board):
        return _ended(game, info, won, mine, {})
    return Turn([{"role": "user", "content": shown(game.board, brief)}], info=info)


def _ended(game: TicTacToeState, info: dict, won: int | None, mine: int, more: dict) -> Turn:
    """The last turn with the returns of both sides; if the policy played one side, `mine`, the reward is that side's."""
    returns = [0, 0] if won is None else [1 if side == won else -1 for side in (0, 1)]
    return Turn(reward=0 if game.opponent is None else returns[mine], done=True, info={**info, **more, "returns": returns})

"""Environments with rules on arrays: one trajectory at a time under the usual contract, or all of them in one program."""
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.environments import games
from jaxrl_llm.environments.base import Environment, Message, Rubbish, Turn, checked, digest
from jaxrl_llm.environments.games import Game, GameBatch, Shown
from jaxrl_llm.environments.worker import StepRequest
from jaxrl_llm.rewards.process import Outcome
from jaxrl_llm.tasks.base import Problem, Task

_FEWEST = 8  # rows of a table


class Alone:
    """The state of one trajectory: a table of one row, its last `Shown`, and the text of its position."""

    def __init__(self, opening: "Opening", problem: Problem, key: int):
        self.game, row = opening.game, np.ones(1, bool)
        self.table, shown = games.opened(self.game, games.empty(self.game, 1), row, *opening.beginnings([(problem, key)]))
        self.shown = _rows(shown)[0]
        self.position = self.game.text(self.shown.seen)

    def step(self, message: Message) -> Turn:
        """The turn after a message, as `Environment.step` returns it."""
        action = games.action_of(self.game, message)
        self.table, shown = games.stepped(self.game, self.table, np.ones(1, bool), np.array([action], np.int32))
        self.shown = _rows(shown)[0]
        turn, self.position = turn_of(self.game, self.shown, self.position, action)
        return turn


@dataclasses.dataclass(frozen=True)
class Opening:
    """The `reset` of an environment that plays a game; problems from number `train` on are held out."""

    game: Game
    train: int

    def __call__(self, problem: Problem, key: int) -> tuple[Alone, list[Message]]:
        state = Alone(self, problem, key)
        return state, _opening(self.game, state.shown, state.position)

    def beginnings(self, trajectories: Sequence[tuple[Problem, int]]) -> tuple[np.ndarray, ...]:
        """For each problem and key: data u32[n, 2] of the seed's key and of the chance's key, and whether it is held out."""
        seeds, keys = [problem.extra["seed"] for problem, _ in trajectories], [key for _, key in trajectories]
        return games.words64(seeds), games.words64(keys), np.array([problem.id >= self.train for problem, _ in trajectories])


def environment_of(game: Game, *, name: str, task: Task, returns: tuple[float, float], facts: Mapping[str, str] | None = None,
                   oracle: Any = None) -> Environment:
    """The environment of a game, whose problems have an `extra["seed"]`; `oracle(seen) -> str` is a perfect move."""
    apart = game.reader is not None
    return Environment(
        name=name, task=task, reset=Opening(game, len(task.train)), step=Alone.step, returns=returns, facts=facts or {},
        contexts=2 if apart else 1, apart=apart,
        oracle=None if oracle is None else lambda state: oracle(state.shown.seen),
        choices=lambda state: games.choices(game, state.shown))


def opening_of(environment: Environment) -> Opening | None:
    """The `Opening` of a game of arrays, which many trajectories can play in one program; None for other environments.

    An environment that wraps a game and changes its messages counts as another.
    """
    return environment.reset if isinstance(environment.reset, Opening) and environment.step is Alone.step else None


def turn_of(game: Game, shown: Shown, before: str, action: int) -> tuple[Turn, str]:
    """The turn after a message, and the text of its position, from the `Shown` of one game.

    `before` is the text of the position in which the message named the `action`. A game cut at its limit has no `returns`.
    """
    ended = shown.done and not shown.truncated
    info = {name: np.asarray(value).tolist() for name, value in shown.info.items() if name != "returns" or ended}
    info |= {"truncated": bool(shown.truncated), "invalid_move": bool(shown.invalid), "state": before,
             "action": game.words[action] if action >= 0 else ""}
    if shown.done:
        return Turn([], float(shown.reward), True, info), ""
    position = game.text(shown.seen)
    return Turn(_said(game, shown, games.answer_text(game, shown, position)), float(shown.reward), False, info), position


class TrajectoryPlace(NamedTuple):
    """The place of a trajectory: its row of the table, its position as text, its messages, and its turns' fingerprint."""

    row: int
    position: str
    said: int
    seen: str


class Compiled:
    """The pool of a `runner.Runner` of kind "compiled": every call of a batch is a row of one table, stepped by one program.

    It compiles once for each power of two of rows. Trajectories without a row are first replayed, all of them together.
    """

    def __init__(self, environment: Environment):
        opening = opening_of(environment)
        if opening is None:
            raise ValueError(f"environment {environment.name!r} is no game of arrays, which can be compiled; use "
                             "kind='processes' or 'threads'")
        self._environment, self._opening, self._game = environment, opening, opening.game
        self._table: GameBatch | None = None
        self._places: dict[tuple[int, int], TrajectoryPlace] = {}

    def map(self, calls: Sequence[tuple]) -> list[Outcome]:
        """The outcome of each `worker.StepRequest`, in order: its next turn, and the seconds that the whole batch took."""
        start = time.perf_counter()
        named = {_name(call): call for call in (StepRequest(*call) for call in calls)}
        gone = {name: call for name, call in named.items() if not self._here(name, call)}
        turns = self._open(gone)
        for count in range(max((len(call.said) for call in gone.values()), default=0) - 1):
            self._step({name: call.said[count] for name, call in gone.items()
                        if count < len(call.said) - 1 and name in self._places})
        for name, call in gone.items():
            if call.said and not self._here(name, call):
                raise RuntimeError(f"environment {self._environment.name!r} answered differently when problem "
                                   f"{call.problem.id} was replayed; its rules must depend on state, action and key alone")
        turns |= self._step({name: call.said[-1] for name, call in named.items() if call.said})
        seconds = time.perf_counter() - start
        return [Outcome("ok", {"failed": ("rubbish", turn), "seconds": seconds} if isinstance(turn, str) else
                        {"turn": turn, "seconds": seconds}) for turn in (turns[name] for name in named)]

    def drop(self, target: str, options: str, key: int, problem: Problem) -> None:
        """Forgets a trajectory that will not be continued."""
        self._places.pop((key, problem.id), None)

    def close(self) -> None:
        """Drops all states; continued trajectories are replayed."""
        self._table, self._places = None, {}

    def _here(self, name: tuple[int, int], call: StepRequest) -> bool:
        place = self._places.get(name)
        return place is not None and (place.said, place.seen) == (len(call.said) - 1, call.seen)

    def _open(self, calls: Mapping[tuple[int, int], StepRequest]) -> dict[tuple[int, int], Turn | str]:
        if not calls:
            return {}
        for name in calls:
            self._places.pop(name, None)
        rows = self._room(len(calls))
        capacity = len(self._table.count)
        begun = self._opening.beginnings([(call.problem, call.key) for call in calls.values()])
        new, padded = np.zeros(capacity, bool), [np.zeros((capacity, *x.shape[1:]), x.dtype) for x in begun]
        for full, given in zip([new, *padded], [np.ones(len(calls), bool), *begun]):
            full[rows] = given
        self._table, shown = games.opened(self._game, self._table, new, *padded)
        turns: dict[tuple[int, int], Turn | str] = {}
        for name, row, one in zip(calls, rows, _rows(shown, rows)):
            position = self._game.text(one.seen)
            turn = Turn(_opening(self._game, one, position))
            self._places[name] = TrajectoryPlace(row, position, 0, digest([turn]))
            turns[name] = turn
        return turns

    def _step(self, said: Mapping[tuple[int, int], Message]) -> dict[tuple[int, int], Turn | str]:
        if not said:
            return {}
        places = [self._places[name] for name in said]
        rows = [place.row for place in places]
        going, actions = np.zeros(len(self._table.count), bool), np.full(len(self._table.count), -1, np.int32)
        going[rows] = True
        actions[rows] = [games.action_of(self._game, message) for message in said.values()]
        self._table, shown = games.stepped(self._game, self._table, going, actions)
        return {name: self._settled(name, one, int(actions[place.row]))
                for name, place, one in zip(said, places, _rows(shown, rows))}

    def _settled(self, name: tuple[int, int], shown: Shown, action: int) -> Turn | str:
        """The checked turn, or the reason why it is invalid; updates the place of its trajectory, or frees it at the end."""
        place = self._places.pop(name)
        turn, position = turn_of(self._game, shown, place.position, action)
        try:
            turn = checked(self._environment, turn)
        except Rubbish as error:
            return str(error)
        if not turn.done:
            self._places[name] = place._replace(position=position, said=place.said + 1, seen=digest([turn], place.seen))
        return turn

    def _room(self, count: int) -> list[int]:
        """Free rows for `count` trajectories; an empty table is made anew, and one that is too small grows."""
        taken = {place.row for place in self._places.values()}
        capacity = max(_FEWEST, 1 << (len(taken) + count - 1).bit_length())
        if self._table is None or not taken:
            self._table = games.empty(self._game, capacity)
        elif capacity > (old := len(self._table.count)):
            self._table = jax.tree.map(lambda x: jnp.pad(x, [(0, capacity - old)] + [(0, 0)] * (x.ndim - 1)), self._table)
        free = (row for row in range(len(self._table.count)) if row not in taken)
        return [next(free) for _ in range(count)]


def _name(call: StepRequest) -> tuple[int, int]:
    return call.key, call.problem.id


def _rows(shown: Shown, rows: Iterable[int] = (0,)) -> list[Shown]:
    """The `Shown` of each of these games, on the host."""
    shown = jax.device_get(shown)
    return [jax.tree.map(lambda x: x[row], shown) for row in rows]


def _opening(game: Game, shown: Shown, position: str) -> list[Message]:
    if game.reader is None:
        return _said(game, shown, games.opening_text(game, shown, position))
    return [{"role": "system", "content": game.rules}, *_said(game, shown, games.answer_text(game, shown, position))]


def _said(game: Game, shown: Shown, text: str) -> list[Message]:
    return [{"role": "user", "content": text, **({} if game.reader is None else {"reader": game.reader(shown.seen)})}]

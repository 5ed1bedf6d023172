"""Games as pure functions of arrays: many of them step in one compiled program, and each is read and played as text.

The functions of a `Game` take one game; `opened` and `stepped` map them over the rows of a table on the device.
"""
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.environments.words import last_word

Message = Mapping[str, Any]
_LISTED = 40  # legal moves that a text names


class Move(NamedTuple):
    """The result of an action: f32[] reward, bool[] done, and further numbers by name, all with fixed shapes."""

    reward: chex.Array
    done: chex.Array
    info: Mapping[str, chex.Array] = {}


@dataclasses.dataclass(frozen=True)
class Game:
    """The rules of a game for one player at a time, in static shapes; keys are typed keys of `jax.random`.

    Attributes:
      words: words of the A actions, in their order; the last word in a message is the action.
      reset: `reset(key, heldout bool[]) -> state`, any pytree of arrays.
      step: `step(state, action i32[], key) -> (state, Move)` for a legal action.
      legal: `legal(state) -> bool[A]`.
      seen: `seen(state) -> arrays`, the part of a state that `text` reads, on the host.
      text: `text(seen) -> str`.
      rules: the opening's text before the first state.
      turns: maximum number of messages of a trajectory.
      forfeit: `forfeit(state) -> Move` after a message without a legal action; None: the state is kept and the policy is asked
        again.
      brief: messages contain only `text`, neither rules nor legal moves.
      reader: `reader(seen) -> int`, on the host, the one of two agents that moves next, if `text` is for that agent alone; the
        rules are then a message to both (see `Environment.apart`). None: all is for all.
    """

    words: tuple[str, ...]
    reset: Callable[[jax.Array, jax.Array], Any]
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, Move]]
    legal: Callable[[Any], jax.Array]
    seen: Callable[[Any], Any]
    text: Callable[[Any], str]
    rules: str = ""
    turns: int = 100
    forfeit: Callable[[Any], Move] | None = None
    brief: bool = False
    reader: Callable[[Any], int] | None = None


class GameBatch(NamedTuple):
    """C games side by side: their states, u32[C, 2] chance of each trajectory, i32[C] messages so far."""

    states: Any
    chance: chex.Array
    count: chex.Array


class Shown(NamedTuple):
    """The data of C games for their texts: `Game.seen`, bool[C, A] legal, and the results of the last moves.

    These are f32[C] reward, bool[C] done, truncated and invalid (no legal action), and further numbers by name.
    """

    seen: Any
    legal: chex.Array
    reward: chex.Array
    done: chex.Array
    truncated: chex.Array
    invalid: chex.Array
    info: Mapping[str, chex.Array]


def words64(numbers: Sequence[int]) -> np.ndarray:
    """The data u32[n, 2] of keys, from all 64 bits of each number."""
    whole = np.array([number % 2**64 for number in numbers], np.uint64)
    return np.stack([whole >> np.uint64(32), whole & np.uint64(2**32 - 1)], axis=-1).astype(np.uint32)


@functools.partial(jax.jit, static_argnums=0)
def opened(game: Game, table: GameBatch, new: jax.Array, seeds: jax.Array, chance: jax.Array, heldout: jax.Array
           ) -> tuple[GameBatch, Shown]:
    """Begins the games `new` bool[C] of a table, from u32[C, 2] seeds of problems and chances of trajectories."""
    chex.assert_equal_shape([seeds, chance])
    chex.assert_equal_shape([new, heldout, table.count])

    def begin(seed: jax.Array, apart: jax.Array) -> Any:
        return game.reset(_key(seed), apart)

    begun = GameBatch(like(table.states, jax.vmap(begin)(seeds, heldout)), chance, jnp.zeros_like(table.count))
    table = chosen(new, begun, table)
    no = jnp.zeros(new.shape, bool)
    return table, Shown(jax.vmap(game.seen)(table.states), jax.vmap(game.legal)(table.states), jnp.zeros(new.shape), no, no, no,
                        {})


@functools.partial(jax.jit, static_argnums=0)
def stepped(game: Game, table: GameBatch, going: jax.Array, actions: jax.Array) -> tuple[GameBatch, Shown]:
    """Plays one message in the games `going` bool[C]; `actions` i32[C], -1 where a message named none."""
    chex.assert_shape([going, actions], table.count.shape)

    def move(state: Any, action: jax.Array, chance: jax.Array, count: jax.Array) -> tuple[Any, Move, jax.Array]:
        legal = (action >= 0) & game.legal(state)[action]
        after, done = game.step(state, jnp.maximum(action, 0), jax.random.fold_in(_key(chance), count))
        other = (game.forfeit(state) if game.forfeit is not None else jax.tree.map(jnp.zeros_like, done))
        after, done = chosen(legal, (like(state, after), done), (state, like(done, other)))
        return after, done, ~legal

    states, made, invalid = jax.vmap(move)(table.states, actions, table.chance, table.count)
    states, count = chosen(going, states, table.states), table.count + going
    late = (count >= game.turns) & ~made.done
    shown = Shown(jax.vmap(game.seen)(states), jax.vmap(game.legal)(states), made.reward.astype(jnp.float32), made.done | late,
                  late, invalid, made.info)
    return GameBatch(states, table.chance, count), shown


def empty(game: Game, capacity: int) -> GameBatch:
    """A table of `capacity` rows without running games."""
    return GameBatch(jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), _shapes(game)),
                     jnp.zeros((capacity, 2), jnp.uint32), jnp.zeros(capacity, jnp.int32))


def action_of(game: Game, message: Message) -> int:
    """The number of the last action that a message names, ignoring case; -1 if it names none."""
    return last_word(game.words, message["content"])


def opening_text(game: Game, shown: Shown, position: str) -> str:
    """The opening text of a trajectory; `shown` and `position`, the text of its state, are those of one game."""
    return position if game.brief else f"{game.rules}\n\n{position}\n\n{_moves(game, shown)}"


def answer_text(game: Game, shown: Shown, position: str) -> str:
    """The text that the policy reads after a message that did not end the game."""
    if game.brief:
        return position
    return f"{'That is no legal move.' if shown.invalid else position}\n\n{_moves(game, shown)}"


def choices(game: Game, shown: Shown) -> list[str]:
    """The words of all legal actions."""
    return [game.words[action] for action in np.flatnonzero(shown.legal)]


def chosen(which: jax.Array, some: Any, others: Any) -> Any:
    """Rows of `some` where `which` bool[...] holds, else rows of `others`."""
    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(which.shape + (1,) * (a.ndim - which.ndim)), a, b)

    return jax.tree.map(pick, some, others)


def like(pattern: Any, values: Any) -> Any:
    """Values with the types of the pattern: some packages begin with Python numbers and continue with arrays."""
    return jax.tree.map(lambda a, b: jnp.asarray(b, jnp.asarray(a).dtype), pattern, values)


def _key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _moves(game: Game, shown: Shown) -> str:
    """Legal moves by name, as many as fit in a line."""
    legal = choices(game, shown)
    return f"Moves: {', '.join(legal[:_LISTED])}{', ...' if len(legal) > _LISTED else '.'}"


@functools.cache
def _shapes(game: Game) -> Any:
    """Shapes and types of a state."""
    return jax.eval_shape(lambda: game.reset(jax.random.key(0), jnp.bool_(False)))

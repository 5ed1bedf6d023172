"""Games without text: policy, rules and new beginnings in one compiled loop (JaxMARL, Rutherford et al., arXiv 2311.10090)."""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.environments.games import Game, chosen, like


class Running(NamedTuple):
    """A game that goes on: its state, and f32[] return and i32[] length of its episode so far."""

    state: Any
    total: chex.Array
    length: chex.Array


class Step(NamedTuple):
    """A step: f32[] reward, bool[] done, and of the episode that ends with it f32[] total and i32[] length, else 0."""

    reward: chex.Array
    done: chex.Array
    total: chex.Array
    length: chex.Array


def begin(game: Game, key: jax.Array) -> Running:
    """A game at its beginning."""
    return Running(jax.tree.map(jnp.asarray, game.reset(key, jnp.bool_(False))), jnp.float32(0), jnp.int32(0))


def step(game: Game, running: Running, action: jax.Array, key: jax.Array) -> tuple[Running, Step]:
    """One step by i32[] action, which is legal, and a new beginning where it ends the game: the reward is that of the step.

    Step and beginning are computed both, and one of them is taken leaf by leaf, since shapes do not depend on data.
    """
    move_key, begin_key = jax.random.split(key)
    after, move = game.step(running.state, action, move_key)
    length = running.length + 1
    done = move.done | (length >= game.turns)
    total = running.total + move.reward.astype(jnp.float32)
    going = Running(like(running.state, after), total, length)
    made = Step(move.reward.astype(jnp.float32), done, jnp.where(done, total, 0), jnp.where(done, length, 0))
    return chosen(done, begin(game, begin_key), going), made


def any_legal(game: Game, state: Any, key: jax.Array) -> jax.Array:
    """A policy: each legal action with the same probability, i32[]."""
    return jax.random.categorical(key, jnp.where(game.legal(state), 0.0, -jnp.inf)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def rollout(game: Game, key: jax.Array, count: int, steps: int, policy: Callable[[Game, Any, jax.Array], jax.Array] = any_legal
            ) -> tuple[Running, Step]:
    """E games for T steps in one program: the games, and steps [T, E].

    Game e has the key fold_in(key, e), and step t of it fold_in of that with t: it is the same whatever E is.
    """
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))

    def one(running: Running, key: jax.Array) -> tuple[Running, Step]:
        act, go = jax.random.split(key)
        return step(game, running, policy(game, running.state, act), go)

    def all_games(running: Running, number: jax.Array) -> tuple[Running, Step]:
        return jax.vmap(one)(running, jax.vmap(functools.partial(jax.random.fold_in, data=number))(keys))

    return jax.lax.scan(all_games, jax.vmap(functools.partial(begin, game))(keys), jnp.arange(1, steps + 1))

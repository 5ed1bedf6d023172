"""Games without text: policy, rules and resets in one compiled loop (JaxMARL, Rutherford et al., arXiv 2311.10090)."""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.environments.games import Game, chosen, like


class Running(NamedTuple):
    """A running game: its state, and f32[] return and i32[] length of its episode so far."""

    state: Any
    total: chex.Array
    length: chex.Array


class EpisodeStep(NamedTuple):
    """A step: f32[] reward, bool[] done, and if it ends the episode its f32[] total and i32[] length, else 0."""

    reward: chex.Array
    done: chex.Array
    total: chex.Array
    length: chex.Array


def begin(game: Game, key: jax.Array) -> Running:
    """A new game."""
    return Running(jax.tree.map(jnp.asarray, game.reset(key, jnp.bool_(False))), jnp.float32(0), jnp.int32(0))


def step(game: Game, running: Running, action: jax.Array, key: jax.Array) -> tuple[Running, EpisodeStep]:
    """One step with a legal i32[] action, and a reset if it ends the game; the reward is that of the step.

    Step and reset are both computed, and one of them is selected leaf by leaf, since shapes cannot depend on data.
    """
    move_key, begin_key = jax.random.split(key)
    after, move = game.step(running.state, action, move_key)
    length = running.length + 1
    done = move.done | (length >= game.turns)
    total = running.total + move.reward.astype(jnp.float32)
    going = Running(like(running.state, after), total, length)
    made = EpisodeStep(move.reward.astype(jnp.float32), done, jnp.where(done, total, 0), jnp.where(done, length, 0))
    return chosen(done, begin(game, begin_key), going), made


def any_legal(game: Game, state: Any, key: jax.Array) -> jax.Array:
    """A policy that draws a uniformly random legal action, i32[]."""
    return jax.random.categorical(key, jnp.where(game.legal(state), 0.0, -jnp.inf)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def rollout(game: Game, key: jax.Array, count: int, steps: int, policy: Callable[[Game, Any, jax.Array], jax.Array] = any_legal
            ) -> tuple[Running, EpisodeStep]:
    """E games for T steps in one program: the games, and steps [T, E].

    Game e has the key fold_in(key, e), and its step t fold_in of that key with t, so that its play does not depend on E.
    """
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))

    def one(running: Running, key: jax.Array) -> tuple[Running, EpisodeStep]:
        act, go = jax.random.split(key)
        return step(game, running, policy(game, running.state, act), go)

    def all_games(running: Running, number: jax.Array) -> tuple[Running, EpisodeStep]:
        return jax.vmap(one)(running, jax.vmap(functools.partial(jax.random.fold_in, data=number))(keys))

    return jax.lax.scan(all_games, jax.vmap(functools.partial(begin, game))(keys), jnp.arange(1, steps + 1))

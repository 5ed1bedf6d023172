"""A game of arrays without a package: count to five in steps of one or two, and not beyond."""
import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.environments.compiled import environment_of
from jaxrl_llm.environments.games import Game, Move
from jaxrl_llm.tasks.base import seeded


def _reset(key, heldout):
    return {"count": jax.random.randint(key, (), 0, 3), "apart": heldout}


def _step(state, action, key):
    count = state["count"] + action + 1
    luck = jax.random.randint(key, (), 0, 100)
    return {**state, "count": count}, Move(jnp.where(count == 5, 1.0, 0.0), count == 5, {"luck": luck})


def _legal(state):
    return state["count"] + jnp.arange(1, 3) <= 5


def _text(seen):
    return f"{int(seen['count'])}{' apart' if seen['apart'] else ''}"


def _lost(state):
    return Move(jnp.float32(-1.0), jnp.bool_(True), {"luck": jnp.int32(-1)})


GAMES = {strict: Game(words=("one", "two"), reset=_reset, step=_step, legal=_legal, seen=lambda state: state, text=_text,
                      rules="Count to five.", turns=6, forfeit=_lost if strict else None) for strict in (False, True)}


def _unruly(state, action, key):
    state, move = _step(state, action, key)
    return state, move._replace(reward=jnp.where(action == 1, jnp.nan, move.reward))


UNRULY = dataclasses.replace(GAMES[False], step=_unruly)  # "two" has no reward


def counting(*, strict: bool = False, unruly: bool = False, facts: dict | None = None):
    return environment_of(UNRULY if unruly else GAMES[strict], name="counting", task=seeded("counting", "Count.", 20, 5),
                          returns=(-1.0, 1.0), facts=facts,
                          oracle=lambda seen: "one" if (5 - seen["count"]) % 2 else "two")

"""VADE: problems whose rollouts are likely to disagree, by Thompson draws of success rates (arXiv 2511.18902).

The decay of the counts and its numbers are reconstructed from "two-scale prior decay"; no code was available.
"""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.control.passes import Shares, first_of, key_of


class Counts(NamedTuple):
    """For each of N problems, f32[N]: decayed successes and failures. `ids` i32[B] come next, `seed` u32[2], `step` i32[]."""

    successes: Array
    failures: Array
    ids: Array
    seed: Array
    step: Array
    shares: Shares


def gain(rate: Array) -> Array:
    """`p (1 - p)^2`, largest at 1/3."""
    return rate * (1 - rate)**2


def decayed(successes: Array, failures: Array, tried: Array, right: Array, *, local: float, broad: float
            ) -> tuple[Array, Array]:
    """Counts f32[N] after a step: `local` times the old ones plus the outcomes for tried problems, else `broad` times them."""
    rate = jnp.where(tried > 0, local, broad)
    return rate * successes + right, rate * failures + tried - right


@functools.partial(jax.jit, static_argnums=4)
def chosen(key: Array, successes: Array, failures: Array, shares: Shares, count: int) -> Array:
    """i32[count]: the problems of largest `gain` of a draw from Beta(successes + 1, failures + 1); -1 beyond N.

    Each task has its share, see `passes.first_of`.
    """
    rates = jax.random.beta(key, successes + 1, failures + 1)
    order = jnp.argsort(-gain(rates), stable=True)
    return first_of(jax.random.fold_in(key, 1), order, jnp.ones(order.shape, bool), shares, count)


@controller
def vade(*, local: float = 0.9, broad: float = 0.99) -> Controller:
    """`prompt_ids`: the `chosen` problems, with counts `decayed` in each step. Facts: `tried`, `right`.

    Raises ValueError: a decay outside (0, 1].
    """
    if not (0 < local <= 1 and 0 < broad <= 1):
        raise ValueError(f"local={local}, broad={broad}; decays are above 0 and at most 1")

    def init(shares, batch, seed):
        none = jnp.zeros(shares.problems)
        ids = chosen(key_of(seed, jnp.int32(0)), none, none, shares, batch)
        return Counts(none, none, ids, jnp.asarray(seed), jnp.int32(0), shares)

    def observe(counts, facts):
        step = counts.step + 1
        won, lost = decayed(counts.successes, counts.failures, facts["tried"], facts["right"], local=local, broad=broad)
        ids = chosen(key_of(counts.seed, step), won, lost, counts.shares, counts.ids.size)
        return counts._replace(successes=won, failures=lost, ids=ids, step=step)

    return Controller(init, lambda counts: {"prompt_ids": counts.ids}, observe, facts=("tried", "right"), knobs=("prompt_ids",))

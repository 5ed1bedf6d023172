"""DRIVE: all problems with few short rollouts, then only the hardest with many long ones (arXiv 2511.06307)."""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class Focus(NamedTuple):
    """State: the walk; for each of N problems `kept` bool[N] and its `rate` f32[N] when last sampled, -1: never.

    `sizes` i32[2], rollouts of a prompt in the first stage and later; `most` i32[], tokens.
    """

    walk: passes.Walk
    kept: Array
    rate: Array
    sizes: Array
    most: Array


def hardest(rate_N: Array, kept_N: Array, count: Array | int) -> Array:
    """bool[N]: the `count` problems of lowest success rate among those where `kept_N`; ties: the first."""
    order = jnp.lexsort((jnp.arange(rate_N.size), rate_N, ~kept_N))
    rank = jnp.zeros(rate_N.size, jnp.int32).at[order].set(jnp.arange(rate_N.size, dtype=jnp.int32))
    return kept_N & (rank < count)


@controller
def drive(*, keep: Sequence[float] = (72 / 175, 50 / 175, 25 / 175), steps: Sequence[int] = (32, 64, 32, 32),
          first_length: float = 0.75) -> Controller:
    """`prompt_ids`, `prompt_weights`, `group_sizes`, `max_tokens`: a stage with all problems, then ever fewer hard ones.

    The first `steps[0]` steps walk through all problems with G rollouts of a share `first_length` of the tokens. Then come
    phases of `steps[1:]` steps with `sampling.max_group` rollouts at full length; each keeps the `hardest` of the remaining
    problems, a share `keep[k]` of the task, rounded. A dropped problem never returns, and a problem that is never solved stays.
    Each problem's rate is from its last sampling, while the paper measures all problems again before each phase. A problem that
    was never sampled counts as hardest. The last phase never ends. Facts: `tried`, `right`. Raises ValueError: shares that do
    not fall, or not one number of steps more than shares.
    """
    if len(steps) != len(keep) + 1 or min(steps) < 1 or list(keep) != sorted(keep, reverse=True) \
            or not all(0 < share <= 1 for share in (*keep, first_length)):
        raise ValueError(f"keep={tuple(keep)}, steps={tuple(steps)}, first_length={first_length}; give shares above 0 and at "
                         "most 1 that do not grow, and one number of steps for the first stage and each of them")
    begins = [sum(steps[:k + 1]) for k in range(len(keep))]

    def observe(state, facts):
        tried = facts["tried"]
        rate = jnp.where(tried > 0, facts["right"] / jnp.maximum(tried, 1), state.rate)
        counts = jnp.asarray([max(round(share * rate.size), 1) for share in keep])
        begun = jnp.asarray(begins) == state.walk.step + 1
        kept = jnp.where(begun.any(), hardest(rate, state.kept, jnp.sum(jnp.where(begun, counts, 0))), state.kept)
        return state._replace(walk=passes.advance(state.walk, tried, kept), kept=kept, rate=rate)

    def propose(state):
        first = state.walk.step < begins[0]
        tokens = jnp.where(first, jnp.ceil(first_length * state.most - 1e-4).astype(jnp.int32), state.most)
        return {"prompt_ids": state.walk.ids, "prompt_weights": state.kept.astype(jnp.float32),
                "group_sizes": jnp.full(state.walk.ids.shape, jnp.where(first, *state.sizes)), "max_tokens": tokens}

    def init(shares, batch, seed, group, max_group, max_tokens):
        return Focus(passes.start(shares, batch, seed), jnp.ones(shares.problems, bool), jnp.full(shares.problems, -1.0),
                     jnp.array([group, max_group], jnp.int32), jnp.int32(max_tokens))

    return Controller(init, propose, observe, facts=("tried", "right"),
                      knobs=("prompt_ids", "prompt_weights", "group_sizes", "max_tokens"))

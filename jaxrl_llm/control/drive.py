"""DRIVE: all problems with few short rollouts, then only the hardest with many long ones (arXiv 2511.06307)."""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control import passes
from jaxrl_llm.control.base import Controller, controller


class Focus(NamedTuple):
    """State: the walk; the problems that are `kept` bool[N]; whether a measure of them is `due` before the next step, bool[].

    `sizes` i32[2], rollouts of a prompt in the first stage and later; `most` i32[], tokens.
    """

    walk: passes.Walk
    kept: Array
    due: Array
    sizes: Array
    most: Array


def hardest(rate_N: Array, kept_N: Array, count: Array | int) -> Array:
    """bool[N]: the `count` problems of lowest success rate among those where `kept_N`; ties: the first."""
    order = jnp.lexsort((jnp.arange(rate_N.size), rate_N, ~kept_N))
    rank = jnp.zeros(rate_N.size, jnp.int32).at[order].set(jnp.arange(rate_N.size, dtype=jnp.int32))
    return kept_N & (rank < count)


@controller
def drive(*, keep: Sequence[float] = (72 / 175, 50 / 175, 25 / 175), steps: Sequence[int] = (32, 64, 32, 32),
          first_length: float = 0.75, times: int = 8) -> Controller:
    """`prompt_ids`, `prompt_weights`, `group_sizes`, `max_tokens`, `measured_times`: all problems, then ever fewer hard ones.

    The first `steps[0]` steps walk through all problems with G rollouts of a share `first_length` of the tokens. Then come
    phases of `steps[1:]` steps with `sampling.max_group` rollouts at full length. Before each of them all remaining problems
    are asked `times` times, a number that the paper leaves open, and the `hardest` stay, a share `keep[k]` of the task,
    rounded. A dropped problem never returns, and a problem that is never solved stays. One whose prompt does not fit counts as
    easiest. The last phase never ends. Facts: `tried`, `measured_tried`, `measured_right`. Raises ValueError: shares that do
    not fall, not one number of steps more than shares, or fewer than one answer.
    """
    if len(steps) != len(keep) + 1 or min(*steps, times) < 1 or list(keep) != sorted(keep, reverse=True) \
            or not all(0 < share <= 1 for share in (*keep, first_length)):
        raise ValueError(f"keep={tuple(keep)}, steps={tuple(steps)}, first_length={first_length}, times={times}; give shares "
                         "above 0 and at most 1 that do not grow, one number of steps for the first stage and each of "
                         "them, and one answer or more")
    begins = [sum(steps[:k + 1]) for k in range(len(keep))]

    def observe(state, facts):
        if "measured_tried" in facts:
            return measured(state, facts)
        walk = passes.advance(state.walk, facts["tried"], state.kept)
        return state._replace(walk=walk, due=(jnp.asarray(begins) == walk.step).any())

    def measured(state, facts):
        tried, N = facts["measured_tried"], state.kept.size
        rate = jnp.where(tried > 0, facts["measured_right"] / jnp.maximum(tried, 1), jnp.inf)
        counts = jnp.asarray([max(round(share * N), 1) for share in keep])
        count = jnp.sum(jnp.where(jnp.asarray(begins) == state.walk.step, counts, 0))
        kept = jnp.where(state.due, hardest(rate, state.kept, count), state.kept)
        return state._replace(walk=passes.narrowed(state.walk, kept), kept=kept, due=jnp.zeros_like(state.due))

    def propose(state):
        first = state.walk.step < begins[0]
        tokens = jnp.where(first, jnp.ceil(first_length * state.most - 1e-4).astype(jnp.int32), state.most)
        return {"prompt_ids": state.walk.ids, "prompt_weights": state.kept.astype(jnp.float32),
                "group_sizes": jnp.full(state.walk.ids.shape, jnp.where(first, *state.sizes)), "max_tokens": tokens,
                "measured_times": jnp.where(state.due & state.kept, times, 0).astype(jnp.int32)}

    def init(shares, batch, seed, group, max_group, max_tokens):
        return Focus(passes.start(shares, batch, seed), jnp.ones(shares.problems, bool), jnp.array(False),
                     jnp.array([group, max_group], jnp.int32), jnp.int32(max_tokens))

    return Controller(init, propose, observe, facts=("tried", "measured_tried", "measured_right"),
                      knobs=("prompt_ids", "prompt_weights", "group_sizes", "max_tokens", "measured_times"))

"""Prompt-GDRO: an adversary over bins of prompts with similar pass rates weights advantages (arXiv 2601.19280)."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.control import accuracy_bins
from jaxrl_llm.control.accuracy_bins import BINS, Windows
from jaxrl_llm.control.surrogate import check_signal, losses_of
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

MODES = ("code", "paper")


class Adversary(NamedTuple):
    """Statistics of prompts and of their bins: `moving` f32[B], moving losses, and `seen` f32[B], steps with the bin.

    The prompt with id i has the index i % N in `ids` i32[N] (-1: none) and `windows`; a prompt with the same index replaces it.
    """

    ids: Array
    windows: Windows
    moving: Array
    seen: Array


def bin_weights(moving_B: Array, bins_P: Array, real_P: Array, *, mode: str = "code", rate: float = 0.65, mix: float = 0.01,
                most: float = 15.0, bound: float = 3.0) -> Array:
    """f32[P]: the factor of each prompt's advantages, by its bin.

    `code`, as released: `q = (1 - mix) softmax(rate loss) + mix / B` over the B bins in the batch, at most `most`,
    divided by its mean over the prompts. `paper`: `exp(rate clip(loss, -bound, bound))`, at most `most`. Raises ValueError
    for another mode.
    """
    if registry.one_of("mode", mode, MODES) == "paper":
        return jnp.minimum(jnp.exp(rate * jnp.clip(moving_B, -bound, bound)), most)[bins_P]
    there = jnp.zeros(BINS, bool).at[jnp.where(real_P, bins_P, BINS)].set(True, mode="drop")
    number = jnp.maximum(masked.count(there), 1)
    share = jnp.where(there, jax.nn.softmax(rate * moving_B, where=there), 0)
    weight = jnp.minimum((1 - mix) * share + mix / number, most)[bins_P]
    mean = masked.mean(weight, real_P)
    return jnp.minimum(weight / jnp.where(mean > 0, mean, 1), most)


def followed(moving_B: Array, seen_B: Array, bins_P: Array, losses_PG: Array, valid_PG: Array, *, decay: float = 0.12,
             per_share: bool = False) -> tuple[Array, Array]:
    """`(moving, seen)` f32[B] after a batch with these losses: each bin's moving loss follows the mean loss of its rollouts.

    A bin's first mean becomes its moving loss, later means enter with the weight `decay`. Bins without a rollout do not change.
    `per_share` divides the mean by the bin's share of the batch: an option of the released code for its loss, which is about 0.
    With a loss of about 1 the moving loss would mostly measure how few prompts a bin has.
    """
    inside = (bins_P[None, :, None] == jnp.arange(BINS)[:, None, None]) & valid_PG[None]
    count = masked.count(inside, axis=(1, 2))
    loss = masked.mean(jnp.broadcast_to(losses_PG[None], inside.shape), inside, axis=(1, 2))
    loss = loss * jnp.sum(count) / jnp.maximum(count, 1) if per_share else loss
    moved = jnp.where(seen_B > 0, (1 - decay) * moving_B + decay * loss, loss)
    there = count > 0
    return jnp.where(there, moved, moving_B), seen_B + there


@estimator
def gdro_prompt(*, num_prompts: int = 65536, window: int = 100, mode: str = "code", rate: float = 0.65, mix: float = 0.01,
                decay: float = 0.12, per_share: bool = False, most: float = 15.0, margin: float = 0.03, eps: float = 1e-6,
                clip: float = 5.0, signal: str = "one_minus_pass") -> Estimator:
    """`A = w_b clip((r - group mean) / (group std + eps))`, w the `bin_weights` of the prompt's bin b from before this step.

    A prompt's bin follows the share of its last `window` visits in which one of its rollouts was right, with a `margin`; a new
    prompt starts in the hardest bin. Then the moving losses have `followed` the `signal` of the rollouts. `surrogate` is the
    paper's, the `surrogate_loss` of advantages without weights, which is known after the updates of the step. `one_minus_pass`,
    1 - [right], is ours and the default: without drift the surrogate loss of every group is zero, so that the adversary would
    see nothing. The numbers are the paper's, except the bound of the moving losses and `num_prompts`, which are ours: with more
    prompts than that, prompts that share an index keep overwriting each other.
    """
    registry.one_of("mode", mode, MODES)
    by_surrogate = check_signal(signal)

    def init():
        return Adversary(jnp.full(num_prompts, -1, jnp.int32), accuracy_bins.unseen(num_prompts, window), jnp.zeros(BINS),
                         jnp.zeros(BINS))

    def advantages(rollouts, state):
        rewards, valid, ids = rollouts.rewards, rollouts.valid, rollouts.prompt_ids
        own = rollouts.fresh  # a pool adds rollouts of others, which are trained on and say nothing of this policy
        real, size = jnp.any(valid, axis=1), state.ids.size
        z = group_z_score(rewards, valid, eps=eps)
        place = ids % size
        known = (ids >= 0) & (state.ids[place] == ids)
        mine = Windows(*(x[place] for x in state.windows))
        previous = jnp.where(known, mine.bins, -1)
        bins = accuracy_bins.bins_of(jnp.where(known, accuracy_bins.accuracy(mine), 0), previous, margin=margin)
        weights = bin_weights(state.moving, bins, real, mode=mode, rate=rate, mix=mix, most=most)
        losses = 1 - rollouts.correct.astype(rewards.dtype)
        moving, seen = (state.moving, state.seen) if by_surrogate else followed(
            state.moving, state.seen, bins, losses, own, decay=decay, per_share=per_share)
        counted = jnp.where(jnp.any(own, axis=1) & (ids >= 0), place, size)
        new = jnp.where(known, size, counted)
        visited = jnp.zeros(size, bool).at[counted].set(True, mode="drop")
        solved = jnp.zeros(size, bool).at[counted].max(jnp.any(own & rollouts.correct, axis=1), mode="drop")
        windows = state.windows._replace(visits=state.windows.visits.at[new].set(0, mode="drop"),
                                         bins=state.windows.bins.at[counted].set(bins, mode="drop"))
        windows, ids = accuracy_bins.visited(windows, visited, solved), state.ids.at[counted].set(ids, mode="drop")
        return weights[:, None] * jnp.clip(z, -clip, clip), Adversary(ids, windows, moving, seen)

    def learned(rollouts, ratios, state):
        ids, size = rollouts.prompt_ids, state.ids.size
        place = ids % size
        counted = rollouts.fresh & ((ids >= 0) & (state.ids[place] == ids))[:, None]
        losses = losses_of(rollouts, ratios, place, counted, size, eps=eps)
        bins = jnp.maximum(state.windows.bins[place], 0)
        moving, seen = followed(state.moving, state.seen, bins, losses, counted, decay=decay, per_share=per_share)
        return state._replace(moving=moving, seen=seen)

    made = stateful(init, advantages, needs=("rewards", "prompt_ids"))
    return made._replace(learned=learned) if by_surrogate else made

"""Bins of prompts by how often a rollout of a group solved them, for group DRO (arXiv 2601.19280)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked

EDGES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
BINS = len(EDGES) + 1


class Windows(NamedTuple):
    """For each of N prompts: whether its last W visits had a right rollout, bool[N, W]; visits and bin (-1: none), i32[N]."""

    solved: Array
    visits: Array
    bins: Array


def unseen(prompts: int, window: int) -> Windows:
    """The windows before any visit."""
    return Windows(jnp.zeros((prompts, window), bool), jnp.zeros(prompts, jnp.int32), jnp.full(prompts, -1, jnp.int32))


def visited(windows: Windows, seen_N: Array, solved_N: Array) -> Windows:
    """The windows after a visit of the prompts where `seen_N` bool[N]; `solved_N` bool[N]: a rollout of the group was right."""
    number, window = windows.solved.shape
    place = jnp.where(seen_N, windows.visits % window, window)
    solved = windows.solved.at[jnp.arange(number), place].set(solved_N, mode="drop")
    return windows._replace(solved=solved, visits=windows.visits + seen_N)


def accuracy(windows: Windows) -> Array:
    """f32[N]: the share of solved visits in the window, 0 without a visit."""
    there = jnp.arange(windows.solved.shape[1])[None] < windows.visits[:, None]
    return masked.mean(windows.solved.astype(jnp.float32), there, axis=1)


def bins_of(accuracy_P: Array, previous_P: Array, *, margin: float = 0.03) -> Array:
    """i32[P]: the number of `EDGES` that an accuracy reaches; a prompt leaves its previous bin (-1: none) only by a margin.

    It moves up if the accuracy is at least the upper edge of its bin plus `margin`, down if it is at most the upper edge of the
    new bin minus `margin`.
    """
    edges = jnp.asarray(EDGES)
    raw = jnp.sum(accuracy_P[:, None] >= edges[None] - 1e-6, axis=1, dtype=jnp.int32)
    edge = edges[jnp.clip(jnp.minimum(previous_P, raw), 0, len(EDGES) - 1)]
    far = jnp.where(raw > previous_P, accuracy_P >= edge + margin - 1e-6, accuracy_P <= edge - margin + 1e-6)
    return jnp.where((previous_P < 0) | far, raw, previous_P)

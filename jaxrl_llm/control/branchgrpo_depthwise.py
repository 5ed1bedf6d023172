"""BranchGRPO's pruning: the segments of a tree that are trained on; sampling is not reduced (arXiv 2509.06040).

All functions take and return arrays of the rows of `jaxrl_llm.maths.trees`; the tree's advantages are computed before pruning.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked, segments


def outside_window(depth_PG: Array, step: Array, *, start: int, width: int, interval: int, stop_depth: int) -> Array:
    """bool[P, G]: rows not in the `width` depths from `max(start - step // interval, stop_depth)` on.

    The window of dropped depths moves one depth towards the prompt every `interval` optimiser steps.
    """
    low = jnp.maximum(start - step // interval, stop_depth)
    return (depth_PG < low) | (depth_PG >= low + width)


def best_child(value_PG: Array, parent_PG: Array, valid_PG: Array) -> Array:
    """bool[P, G]: the row of highest `value` among its siblings; the first of equal ones."""
    siblings = segments.same(valid_PG, parent_PG)
    values = jnp.broadcast_to(value_PG[:, None, :], siblings.shape)
    top = siblings & (values == masked.max(values, siblings, axis=-1, initial=-jnp.inf)[..., None])
    return valid_PG & (jnp.argmax(top, axis=-1) == jnp.arange(valid_PG.shape[-1])[None])


def extreme_paths(rewards_PG: Array, leaf_PG: Array, descendants_PGG: Array) -> Array:
    """bool[P, G]: rows on the path to the best or the worst leaf of the prompt; the first of equal leaves."""
    best = jnp.argmax(jnp.where(leaf_PG, rewards_PG, -jnp.inf), axis=1)
    worst = jnp.argmin(jnp.where(leaf_PG, rewards_PG, jnp.inf), axis=1)
    chosen = jnp.stack([best, worst], axis=-1)[:, None, :]
    on_path = jnp.take_along_axis(descendants_PGG, chosen, axis=-1)
    return jnp.any(on_path, axis=-1) & jnp.any(leaf_PG, axis=1, keepdims=True)

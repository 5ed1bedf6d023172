"""Steps inside a completion (turns, thoughts): arrays `[P, G, K]` with K = T, from and to tokens `[P, G, T]`."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def number_steps(step_ids_PGT: Array, mask_PGT: Array) -> tuple[Array, Array]:
    """(i32[P, G, T]: which of the rollout's own steps a token is in, from 0; bool[P, G, K]: steps that exist).

    A step is a run of counting tokens with one id; ids are >= 0 and do not decrease along a rollout.
    """
    reached = lax.cummax(jnp.where(mask_PGT, step_ids_PGT, -1), axis=2)
    before = jnp.pad(reached, ((0, 0), (0, 0), (1, 0)), constant_values=-1)[..., :-1]
    begun = jnp.cumsum(mask_PGT & (step_ids_PGT > before), axis=-1, dtype=jnp.int32)
    exists = jnp.arange(mask_PGT.shape[-1], dtype=jnp.int32)[None, None] < begun[..., -1:]
    return jnp.maximum(begun - 1, 0), exists


def sum_steps(x_PGT: Array, step_PGT: Array, mask_PGT: Array) -> Array:
    """[P, G, K]: sum of `x` over the counting tokens of each step, `step_PGT` from `number_steps`."""
    length = mask_PGT.shape[-1]
    add = jax.vmap(jax.vmap(lambda x, step: jax.ops.segment_sum(x, step, num_segments=length)))
    return add(jnp.where(mask_PGT, x_PGT, 0), step_PGT)


def spread_steps(x_PGK: Array, step_PGT: Array) -> Array:
    """[P, G, T]: the number of the step on each of its tokens."""
    return jnp.take_along_axis(x_PGK, step_PGT, axis=-1)

"""The rollout that MC-GRPO samples for its median and does not train on (arXiv 2601.22582)."""
import jax.numpy as jnp
from jax import Array


def lower_median(x_PG: Array, valid_PG: Array) -> Array:
    """Entry (n - 1) // 2 of the n sorted valid values of each prompt, `[P, G] -> [P, 1]`; 0 if there are none."""
    ordered = jnp.sort(jnp.where(valid_PG, x_PG, jnp.inf), axis=1)
    n = jnp.sum(valid_PG, axis=1, keepdims=True, dtype=jnp.int32)
    middle = jnp.take_along_axis(ordered, jnp.maximum(n - 1, 0) // 2, axis=1)
    return jnp.where(n > 0, middle, jnp.zeros((), x_PG.dtype))


def without_pivot(rewards_PG: Array, valid_PG: Array) -> Array:
    """bool[P, G]: the valid rollouts except one per prompt, the first whose reward is the lower median.

    The pivot's advantage is 0; dropping it makes the update of G + 1 samples as cheap as one of G. An all-equal group
    loses its first rollout, a group of one its only one.
    """
    candidate = valid_PG & (rewards_PG == lower_median(rewards_PG, valid_PG))
    pivot = candidate & (jnp.cumsum(candidate, axis=1, dtype=jnp.int32) == 1)
    return valid_PG & ~pivot

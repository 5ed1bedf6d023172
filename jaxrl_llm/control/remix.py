"""ReMix: the recent policy that each trajectory is taken from (arXiv 2507.06892)."""

import jax
import jax.numpy as jnp
from jax import Array


def policy_ages(
    key: Array, rows: int, stored: int | Array, *, reuse: float = 0.4, max_age: int = 2
) -> Array:
    """i32[rows]: 0 for a fresh trajectory, i for one of the policy i steps back.

    With probability `reuse` i is uniform in 1 .. min(max_age, stored), `stored` the number of earlier policies with stored
    trajectories; with `stored=0` all are fresh, as after the switch to on-policy training.
    """
    which, age = jax.random.split(key)
    oldest = jnp.minimum(max_age, stored)
    ages = jax.random.randint(age, (rows,), 1, jnp.maximum(oldest, 1) + 1)
    return jnp.where(jax.random.bernoulli(which, reuse, (rows,)) & (oldest > 0), ages, 0)

"""ReMix: which of the recent policies a trajectory is taken from (arXiv 2507.06892)."""

import jax
import jax.numpy as jnp
from jax import Array


def policy_ages(
    key: Array, rows: int, stored: int | Array, *, reuse: float = 0.4, max_age: int = 2
) -> Array:
    """i32[rows]: 0 for a fresh trajectory, i for one of the policy i steps back.

    With probability `reuse` i is uniform in 1 .. min(max_age, stored), `stored` the number of earlier policies whose
    trajectories are kept; without any all are fresh. After the switch to on-policy training call it with `stored=0`.
    """
    which, age = jax.random.split(key)
    oldest = jnp.minimum(max_age, stored)
    ages = jax.random.randint(age, (rows,), 1, jnp.maximum(oldest, 1) + 1)
    return jnp.where(jax.random.bernoulli(which, reuse, (rows,)) & (oldest > 0), ages, 0)

"""The value of a prompt under a KL penalty: a soft maximum of its rewards."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def soft_value(rewards_PG: Array, valid_PG: Array, *, temperature: float) -> Array:
    """`temperature * log(mean of exp(r / temperature))` over the valid rollouts: `[P, G] -> [P, 1]`; 0 without any.

    It is between the mean (high temperature) and the largest reward (low temperature), and exactly r if all rewards are r.
    """
    exists = jnp.any(valid_PG, axis=1, keepdims=True)
    top = jnp.max(rewards_PG, axis=1, keepdims=True, where=valid_PG, initial=-jnp.inf)
    top = jnp.where(exists, top, jnp.zeros((), top.dtype))
    average = masked.group_mean(jnp.exp((rewards_PG - top) / temperature), valid_PG)
    return top + temperature * jnp.log(jnp.where(exists, average, 1))

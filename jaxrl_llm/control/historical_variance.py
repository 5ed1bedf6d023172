"""Which example is worth training on alone: the one whose accuracy moved most in an earlier run (arXiv 2504.20571)."""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked


def historical_variance(accuracy_EN: Array, seen_EN: Array) -> Array:
    """f32[N]: population variance over epochs of each example's mean accuracy, over the epochs that visited it."""
    return masked.var(accuracy_EN, seen_EN, axis=0, ddof=0)


def rank(accuracy_EN: Array, seen_EN: Array) -> Array:
    """i32[N]: examples by falling variance; ties in their order."""
    return jnp.argsort(-historical_variance(accuracy_EN, seen_EN))

"""Training on right or on wrong rollouts alone (arXiv 2506.01347)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.tools import registry

VARIANTS = ("psr", "nsr", "weighted")


def reinforced(correct_PG: Array, valid_PG: Array, variant: str) -> Array:
    """bool[P, G]: the rollouts that are trained on: `psr` correct ones, `nsr` wrong ones, `weighted` all valid ones."""
    registry.one_of("variant", variant, VARIANTS)
    chosen = {"psr": correct_PG, "nsr": ~correct_PG, "weighted": jnp.ones_like(correct_PG)}
    return valid_PG & chosen[variant]

"""KEPO: the rollouts to replace by completions that were sampled with a teacher's hint (arXiv 2602.00400)."""
import jax
import jax.numpy as jnp
from jax import Array


def unsolved(rewards_PG: Array, valid_PG: Array) -> Array:
    """bool[P]: prompts whose valid rollouts all have reward 0, the only ones that get hints in the adaptive mode."""
    return jnp.any(valid_PG, axis=1) & ~jnp.any(valid_PG & (rewards_PG != 0), axis=1)


def replaced(key: Array, wanted_P: Array, group: int, *, draws: int = 2) -> Array:
    """bool[P, G]: rollouts to replace, `draws` drawn with replacement (so 1 to `draws`) from each wanted prompt.

    The hinted completion replaces the rollout before rewards and advantages are computed, under the prompt without the hint.
    """
    slots = jax.random.randint(key, (wanted_P.shape[0], draws), 0, group)
    return wanted_P[:, None] & jnp.any(slots[..., None] == jnp.arange(group), axis=1)

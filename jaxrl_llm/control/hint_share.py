"""ADHint: the share of a reference solution to show, from the prompt's unaided difficulty (arXiv 2512.13095)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def hint_ratio(unaided_rewards_PG: Array, valid_PG: Array, noise_P: Array, *, low: float = 0.0, high: float = 0.8) -> Array:
    """f32[P]: `clip((high - low) * difficulty + low + noise, low, high)`, `difficulty = 1 - mean unaided reward`.

    Rewards are in [0, 1]. A prompt that was always solved needs no hint and gets `low` whatever the noise (the paper's
    is normal with deviation 0.05).
    """
    difficulty = 1 - masked.mean(unaided_rewards_PG, valid_PG, axis=1)
    ratio = jnp.clip((high - low) * difficulty + low + noise_P, low, high)
    return jnp.where(difficulty == 0, low, ratio)

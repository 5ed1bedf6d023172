"""Random numbers tied to a position in the batch, so that padding an axis does not change the others."""
import jax
import jax.numpy as jnp
from jax import Array


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """f32[*shape] in [0, 1); entry `[i, j, ...]` depends on the key and the indices, not on the sizes of the axes."""
    if not shape:
        return jax.random.uniform(key, dtype=jnp.float32)
    indices = jnp.arange(shape[0], dtype=jnp.uint32)
    return jax.vmap(lambda i: uniform(jax.random.fold_in(key, i), shape[1:]))(indices)

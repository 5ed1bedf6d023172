"""Vectors in eight bits, each with a scale of its own: half of the bytes of a cache in bfloat16."""
import flax.struct
import jax
import jax.numpy as jnp


class Int8(flax.struct.PyTreeNode):
    """Vectors along one axis, `numbers * scale`.

    numbers: i8[...].  scale: f32[...], the same axes, of size 1 along a vector.
    """

    numbers: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers."""
        return self.numbers.shape


def int8(x: jax.Array, axis: int) -> Int8:
    """The vectors of `x` along `axis`: scale m / 127 and numbers round(127 x / m), m being a vector's largest magnitude."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis, keepdims=True) / 127
    return Int8(jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale)

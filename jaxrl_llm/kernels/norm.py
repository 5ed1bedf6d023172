"""Root-mean-square normalisation (arXiv 1910.07467) of rows stored as one matrix."""
import jax
import jax.numpy as jnp


def plain_rms_norm(x, scale, offset: float, eps: float):
    """The reference of `rms_norm`."""
    y = x.astype(jnp.float32)
    return (y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * (scale + offset)).astype(x.dtype)


def rms_norm(x, scale, offset: float, eps: float, by_head: bool = False):
    """x / sqrt(mean(x^2) + eps) * (scale + offset) over the last axis of `x [..., D]`, in float32; `scale f32[D]`.

    With `by_head` the axis before it is that of heads, which may be sharded.
    """
    # As one matrix: XLA on CPU sums `[1, N, D]` 10 times slower. Merging heads with rows would gather sharded ones.
    y = x.astype(jnp.float32).reshape(-1, *x.shape[-2 if by_head else -1:])
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * (scale + offset)).astype(x.dtype).reshape(x.shape)

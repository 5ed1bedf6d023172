"""Reductions over the real entries of padded arrays; the only place where a masked mean is spelled out.

Every function ignores entries outside `mask` (even NaN), never divides by zero (an empty set has sum, mean, variance
and standard deviation 0) and has finite gradients. `mask` is boolean with the shape of `x`; a floating dtype of `x` is kept,
means and deviations of integers and booleans are float32.
"""
import jax.numpy as jnp
from jax import Array, lax

Axis = int | tuple[int, ...] | None


def sum(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """Sum of `x` over the True entries of `mask`."""
    return jnp.sum(jnp.where(mask, x, jnp.zeros((), x.dtype)), axis=axis, keepdims=keepdims)


def count(mask: Array, axis: Axis = None, keepdims: bool = False, dtype=float) -> Array:
    """Number of True entries as a float."""
    return jnp.sum(jnp.asarray(mask).astype(dtype), axis=axis, keepdims=keepdims)


def _real(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x).astype(jnp.float32)


def mean(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """Mean of `x` over `mask`; entries that are all equal have exactly their common value as mean."""
    x = _real(x)
    # Averaging the distance to the smallest entry makes the mean of equal numbers exact in floating point, so that
    # an all-equal group has deviation 0 and not rounding noise that a division by the std would blow up.
    shift = lax.stop_gradient(jnp.min(x, axis=axis, keepdims=True, where=mask, initial=jnp.inf))
    shift = jnp.where(jnp.isfinite(shift), shift, jnp.zeros((), x.dtype))
    n = count(mask, axis, keepdims=True, dtype=x.dtype)
    result = shift + sum(x - shift, mask, axis, keepdims=True) / jnp.maximum(n, 1)
    return result if keepdims else jnp.squeeze(result, axis)


def var(x: Array, mask: Array, axis: Axis = None, *, ddof: int, keepdims: bool = False) -> Array:
    """Variance of `x` over `mask` with divisor n - ddof; 0 where n <= ddof."""
    x = _real(x)
    deviation = jnp.where(mask, x - mean(x, mask, axis, keepdims=True), jnp.zeros((), x.dtype))
    n = count(mask, axis, keepdims, dtype=x.dtype)
    return jnp.where(n > ddof, jnp.sum(deviation**2, axis=axis, keepdims=keepdims) / jnp.maximum(n - ddof, 1), 0)


def std(x: Array, mask: Array, axis: Axis = None, *, ddof: int, keepdims: bool = False) -> Array:
    """Square root of `var`, with gradient 0 (not infinite) where the variance is 0."""
    variance = var(x, mask, axis, ddof=ddof, keepdims=keepdims)
    positive = variance > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)


def max(x: Array, mask: Array, axis: Axis = None, *, initial: float) -> Array:
    """Largest entry of `x` over `mask`, at least `initial`."""
    return jnp.max(x, axis=axis, where=mask, initial=initial)


def group_mean(x_PG: Array, valid_PG: Array) -> Array:
    """Mean over the valid rollouts of each prompt: `[P, G] -> [P, 1]`."""
    return mean(x_PG, valid_PG, axis=1, keepdims=True)


def group_std(x_PG: Array, valid_PG: Array, *, ddof: int) -> Array:
    """Standard deviation over the valid rollouts of each prompt: `[P, G] -> [P, 1]`; 0 where n <= ddof."""
    return std(x_PG, valid_PG, axis=1, ddof=ddof, keepdims=True)


def group_count(valid_PG: Array) -> Array:
    """Number of valid rollouts of each prompt: `[P, G] -> [P, 1]`, float."""
    return count(valid_PG, axis=1, keepdims=True)


def leave_one_out_mean(x_PG: Array, valid_PG: Array) -> Array:
    """Mean over the OTHER valid rollouts of the prompt: `[P, G] -> [P, G]`; a lone rollout gets its own value."""
    centre = group_mean(x_PG, valid_PG)
    return centre + (centre - x_PG) / jnp.maximum(group_count(valid_PG).astype(x_PG.dtype) - 1, 1)


def unless_alone(x: Array, valid_PG: Array, otherwise: float = 0.0) -> Array:
    """`x` [P, 1] or [P, G], or `otherwise` where a prompt has fewer than two valid rollouts: nothing to compare with."""
    return jnp.where(group_count(valid_PG) > 1, x, otherwise)


def whiten(x: Array, mask: Array, *, eps: float, ddof: int) -> Array:
    """`(x - mean) / sqrt(var + eps)` over all True entries of `mask`, 0 elsewhere."""
    centred = jnp.where(mask, x - mean(x, mask, keepdims=True), jnp.zeros((), x.dtype))
    return centred / jnp.sqrt(var(x, mask, ddof=ddof, keepdims=True) + eps)


def to_tokens(x_PG: Array, mask_PGT: Array) -> Array:
    """Repeats one number per rollout on each of its tokens: `[P, G] -> [P, G, T]`, 0 outside `mask`."""
    return jnp.where(mask_PGT, x_PG[..., None], jnp.zeros((), x_PG.dtype))


def last_token(mask_PGT: Array) -> Array:
    """True on the last True entry of each row of `mask` (last axis), False elsewhere."""
    later = jnp.flip(jnp.cumsum(jnp.flip(mask_PGT, -1), axis=-1, dtype=jnp.int32), -1)
    return mask_PGT & (later == 1)


def discounted_return(x_PGT: Array, mask_PGT: Array, *, gamma: float) -> Array:
    """`R_t = x_t + gamma * R_{t+1}` over the True entries of each row; skipped tokens neither add nor discount.

    `R_{t+1}` is the return of the next True entry, so that tool output inside a completion does not cut the reward off.
    """
    def step(following, inputs):
        x, real = inputs
        value = jnp.where(real, x + gamma * following, following)
        return value, jnp.where(real, value, 0)

    time_major = (jnp.moveaxis(jnp.where(mask_PGT, x_PGT, 0), -1, 0), jnp.moveaxis(mask_PGT, -1, 0))
    _, returns = lax.scan(step, jnp.zeros(x_PGT.shape[:-1], x_PGT.dtype), time_major, reverse=True)
    return jnp.moveaxis(returns, 0, -1)

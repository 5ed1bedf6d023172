"""Ways to keep an update close to the old policy; all are elementwise, `ratio` and `advantages` of one shape."""
import jax.numpy as jnp
from jax import Array, lax


def clipped_surrogate(ratio: Array, advantages: Array, clip_low: float, clip_high: float | Array) -> tuple[Array, Array]:
    """`max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))`, and where the second is larger (arXiv 1707.06347)."""
    free = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(free, clipped), clipped > free


def dual_clip(loss: Array, advantages: Array, bound: float) -> tuple[Array, Array]:
    """`min(loss, -A * bound)` where A < 0, and where the bound applies; `bound > 1` (arXiv 1912.09729)."""
    ceiling = -advantages * bound
    binds = (advantages < 0) & (loss > ceiling)
    return jnp.where(binds, ceiling, loss), binds


def detached_weight(ratio: Array, low: float, high: float) -> Array:
    """`stop_gradient(clip(ratio, low, high))`: a weight that never removes a token (CISPO, arXiv 2506.13585)."""
    return lax.stop_gradient(jnp.clip(ratio, low, high))


def inside(ratio: Array, low: Array | float, high: Array | float) -> Array:
    """bool: `low <= ratio <= high`, for masking a whole token or sequence."""
    return (ratio >= low) & (ratio <= high)


def still_moving(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """bool: False where a step along A moves further outside the range, where `clipped_surrogate` has no gradient."""
    beyond = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return ~beyond


def check_dual_clip(bound: float | None) -> None:
    """Raises ValueError for a bound of the loss that would cut PPO's own region."""
    if bound is not None and bound <= 1:
        raise ValueError(f"dual_clip={bound} must be larger than 1, or None to switch it off")

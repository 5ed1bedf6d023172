"""GVM-RAFT: rollouts in proportion to gradient norm over root of success, for minimal variance (arXiv 2505.02391)."""
import jax.numpy as jnp
from jax import Array


def shares(success_P: Array, norms_P: Array, *, alpha: float = 1e-3, beta: float = 2.0) -> Array:
    """f32[P], summing to 1: `w ~ g / sqrt(p + alpha / p^(beta - 1))`; 0 for prompts without a right rollout, maybe all.

    `success_P`: share of right rollouts in a first pass. `norms_P`: mean norm of `d sum_t log p_t` over its right
    rollouts. The variance `sum g^2 / (p n)` of the gradient is least for `g / sqrt(p)`; alpha damps very small p.
    """
    p = jnp.where(success_P > 0, success_P, 1.0)
    weight = jnp.where(success_P > 0, norms_P / jnp.sqrt(p + alpha / p ** (beta - 1)), 0.0)
    return weight / jnp.where(jnp.sum(weight) > 0, jnp.sum(weight), 1.0)


def round_shares(share_P: Array, total: int) -> Array:
    """i32[P], summing to `total`: `share * total` rounded half to even, then corrected by one where rounding changed most.

    Ties go to the lowest index.
    """
    exact = share_P * total
    counts = jnp.round(exact).astype(jnp.int32)
    short, residual = total - jnp.sum(counts), exact - counts
    most = jnp.argsort(jnp.argsort(-residual, stable=True))
    least = jnp.argsort(jnp.argsort(residual, stable=True))
    return counts + (most < short) - (least < -short)


def allocate(success_P: Array, norms_P: Array, *, total: int, alpha: float = 1e-3, beta: float = 2.0,
             drop_above: float = 1.0, drop_below: float = 0.0) -> Array:
    """i32[P], summing to `total`: `round_shares` of `shares`; equal numbers if no prompt has a share.

    Dropped before rounding: prompts with success above `drop_above`, and those with fewer than `drop_below` expected right
    rollouts. Prompts without a right rollout get none, permanently unless they are measured again.

        allocate([0, .05, .25, .6, 1], [0, 3, 2, 1.5, .4], total=40)  # 0 26 9 4 1
    """
    success_P, norms_P = jnp.asarray(success_P, jnp.float32), jnp.asarray(norms_P, jnp.float32)
    share = shares(success_P, norms_P, alpha=alpha, beta=beta)
    share = jnp.where((success_P > drop_above) | (success_P * share * total < drop_below), 0.0, share)
    left = jnp.sum(share)
    return round_shares(jnp.where(left > 0, share / jnp.where(left > 0, left, 1.0), 1 / share.size), total)

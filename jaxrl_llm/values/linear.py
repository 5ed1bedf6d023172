"""Standardised, optionally reduced features and the regressions on them; all sums run over the real rows of a padded table."""
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from jaxrl_llm.maths import masked

EXACT = jax.lax.Precision.HIGHEST  # accelerators would otherwise multiply in fewer bits than a Gram matrix can spare
_NOISE = 1e-5  # share of the largest spread below which the spread along an axis is rounding
SEED = 42  # seed of random draws inside a fit: equal rows give equal fits


class Scaler(struct.PyTreeNode):
    """Per block `(mean, principal axes)` or None; then mean and deviation `[1, F']` of the columns, where 0 means 1."""

    blocks: tuple[tuple[Array, Array] | None, ...]
    mean: Array
    std: Array


def fit_scaler(features: Array, real: Array, sizes: tuple[int, ...], components: tuple[int | None, ...]) -> Scaler:
    """Means, population deviations and principal components over the `real bool[N]` rows of `[N, F]`.

    `sizes` cuts F into blocks; a block with a number in `components` is reduced to that number of columns, the others are kept.
    """
    blocks: list[tuple[Array, Array] | None] = []
    for block, count in zip(_cut(features, sizes), components):
        if count is None:
            blocks.append(None)
            continue
        centre = masked.mean(block, _rows(real, block), axis=0, keepdims=True)
        blocks.append((centre, principal_components(jnp.where(real[:, None], block - centre, 0.0), count)))
    reduced = _reduce(features, blocks, sizes)
    mask = _rows(real, reduced)
    std = masked.std(reduced, mask, axis=0, ddof=0, keepdims=True)
    return Scaler(tuple(blocks), masked.mean(reduced, mask, axis=0, keepdims=True), std)


def scaled(scaler: Scaler, features: Array, sizes: tuple[int, ...]) -> Array:
    """Rows `[N, F]` in the coordinates of `scaler`, `[N, F']`."""
    return (_reduce(features, scaler.blocks, sizes) - scaler.mean) / jnp.where(scaler.std > 0, scaler.std, 1.0)


def _cut(features, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [features[:, start:start + size] for start, size in zip(starts, sizes)]


def _reduce(features, blocks, sizes):
    if all(block is None for block in blocks):
        return features
    def product(x, map):
        return jnp.matmul(x - map[0], map[1], precision=EXACT)
    return jnp.concatenate([x if map is None else product(x, map) for x, map in zip(_cut(features, sizes), blocks)], axis=1)


def _rows(real, x):
    return jnp.broadcast_to(real[:, None], x.shape)


def principal_components(x: Array, count: int, *, iterations: int = 8) -> Array:
    """The `count` leading principal axes of centred rows `[N, F]`, `[F, count]`: randomised subspace iteration.

    The draw is fixed, so the same rows give the same axes (arXiv 0909.4061, algorithm 4.4); axes beyond the rank of the rows
    are 0. Raises ValueError where `count` is more than N or F.
    """
    if not 1 <= count <= min(x.shape):
        raise ValueError(f"{count} principal components of {x.shape[1]} columns and at most {x.shape[0]} rows; give 1 to "
                         f"{min(x.shape)}, or none to keep the columns as they are")
    wide = min(count + 10, *x.shape)
    basis = jax.random.normal(jax.random.key(SEED), (x.shape[1], wide), x.dtype)
    for _ in range(iterations):
        basis = jnp.linalg.qr(jnp.matmul(x.T, jnp.matmul(x, basis, precision=EXACT), precision=EXACT))[0]
    inside = jnp.matmul(x, basis, precision=EXACT)
    _, axes = jnp.linalg.eigh(jnp.matmul(inside.T, inside, precision=EXACT))  # ascending
    components = jnp.matmul(basis, axes[:, ::-1][:, :count], precision=EXACT)
    # Rows of lower rank leave axes of rounding noise, which standardised would drown the others in every new row.
    spread = jnp.linalg.norm(jnp.matmul(x, components, precision=EXACT), axis=0)
    return jnp.where(spread > _NOISE * spread.max(), components, 0.0)


def ridge_weights(x: Array, y: Array, alpha: float, *, dual: bool | None = None) -> Array:
    """`w = (X'X + alpha I)^{-1} X'y` `[F]` for `x [N, F]`, `y [N]`; rows of zeros change nothing.

    With more columns than rows the same w is `X'(XX' + alpha I)^{-1} y` (`dual`; None takes the smaller system). alpha is
    not divided by N; it is at least `2 eps trace(X'X)`, the smallest number that the dtype can tell from 0 in such a system.
    """
    dual = x.shape[1] > x.shape[0] if dual is None else dual
    side = x if dual else x.T
    gram = jnp.matmul(side, side.T, precision=EXACT)
    alpha = jnp.maximum(alpha, 2 * jnp.finfo(x.dtype).eps * jnp.trace(gram))
    factor = jax.scipy.linalg.cho_factor(gram + alpha * jnp.eye(gram.shape[0], dtype=x.dtype))

    def times(a, v):
        return jnp.matmul(a, v, precision=EXACT)

    def refine(w):
        return w + jax.scipy.linalg.cho_solve(factor, times(x.T, y - times(x, w)) - alpha * w)

    def refine_dual(u):
        return u + jax.scipy.linalg.cho_solve(factor, y - times(x, times(x.T, u)) - alpha * u)

    if dual:  # the second round takes back rounding of the first
        return times(x.T, refine_dual(refine_dual(jnp.zeros_like(y))))
    return refine(refine(jnp.zeros_like(x[0])))


def minimised(loss: Callable[[Any], Array], params: Any, steps: int) -> Any:
    """`params` after `steps` iterations of L-BFGS on the smooth function `loss`."""
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        params, state = carry
        value, grad = value_and_grad(params, state=state)
        change, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, change), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=steps)[0][0]

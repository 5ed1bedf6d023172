"""Steps inside a completion (turns, thoughts), given by the ids of its tokens; all arrays `[P, G, T]`."""

import jax.numpy as jnp
from jax import Array, lax


def step_totals(x_PGT: Array, step_ids_PGT: Array, mask_PGT: Array) -> tuple[Array, Array]:
    """([P, G, T] the sum of `x` over the token's step, on each token; bool[P, G, T] the last token of each step).

    A step is a run of trained tokens with one id; ids do not decrease along a rollout. Tokens are added one after the
    other, so that equal steps have exactly equal sums at every position.
    """
    lowest, highest = jnp.iinfo(step_ids_PGT.dtype).min, jnp.iinfo(step_ids_PGT.dtype).max

    def add(before, inputs):
        (total, reached), (x, step, real) = before, inputs
        total = jnp.where(real, x + jnp.where(step > reached, 0, total), total)
        return (total, jnp.where(real, step, reached)), total

    def spread(after, inputs):
        (total, coming), (so_far, step, real) = after, inputs
        last = real & (step < coming)
        total = jnp.where(last, so_far, total)
        return (total, jnp.where(real, step, coming)), (total, last)

    x, step, real = (jnp.moveaxis(a, -1, 0) for a in (x_PGT, step_ids_PGT, mask_PGT))
    nothing = jnp.zeros_like(x[0])
    _, sums = lax.scan(add, (nothing, jnp.full_like(step[0], lowest)), (x, step, real))
    _, (totals, last) = lax.scan(spread, (nothing, jnp.full_like(step[0], highest)), (sums, step, real), reverse=True)
    return jnp.moveaxis(totals, 0, -1), jnp.moveaxis(last, 0, -1)

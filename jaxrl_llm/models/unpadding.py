"""Completions of unequal length without their padding, so that matrix products see needed tokens only."""
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Unpadding(NamedTuple):
    """The places of the needed tokens of padded completions `[P, G, T]` when packed one after another into fewer slots.

    token: i32[slots], the token in each slot, counted through `[P, G, T]`; P * G * T where a slot is empty.
    slot: i32[P, G, T], the slot of each token; `slots` where it is padding.
    fits: bool[], whether the slots hold all needed tokens.
    """

    token: jax.Array
    slot: jax.Array
    fits: jax.Array

    def remove(self, y):
        """`[P, G, T, ...] -> [slots, ...]`; empty slots are 0."""
        return moved(y.reshape(-1, *y.shape[3:]), self.token, self.slot)

    def restore(self, y):
        """`[slots, ...] -> [P, G, T, ...]`; padding is 0."""
        return moved(y, self.slot, self.token)


def through_last(mask):
    """True up to the last True of each row, `bool[..., T]`, of numpy or jax: the tokens to compute, given those to train.

    An untrained token before a trained one, such as a tool's output, is needed too: the trained token reads it.
    """
    return (mask[..., ::-1].cumsum(-1) > 0)[..., ::-1]


def unpadding(mask: jax.Array, quarters: int) -> Unpadding | None:
    """Gathers completions up to their last trained slot (`mask bool[P, G, T]`) into this number of quarters; None for 4."""
    if quarters == 4:
        return None
    slots = -(-mask.size * quarters // 4)
    needed = through_last(mask)
    count = jnp.cumsum(needed.reshape(-1), dtype=jnp.int32)
    token = jnp.nonzero(needed.reshape(-1), size=slots, fill_value=needed.size)[0].astype(jnp.int32)
    return Unpadding(token, jnp.where(needed, count.reshape(needed.shape) - 1, slots), count[-1] <= slots)


@jax.custom_vjp
def moved(y, there, back):
    """Rows `there` of `y [n, ...]`, 0 for numbers >= n. `back` is the inverse, so that the gradient is a gather as well."""
    return jnp.take(y, there, axis=0, mode="fill", fill_value=0)


def _backward(saved, d_moved):
    there, back = saved
    flat = d_moved.reshape(-1, *d_moved.shape[there.ndim:])
    return moved(flat, back.reshape(-1), there.reshape(-1)), None, None


moved.defvjp(lambda y, there, back: (moved(y, there, back), (there, back)), _backward)

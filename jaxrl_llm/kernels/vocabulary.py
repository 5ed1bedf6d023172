"""Maxima and exponential sums over the vocabulary, in two levels of blocks and with rows last."""
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """Logits `[N, V]` in B blocks of the vocabulary, filled up with -inf: `logits f32[B, width, N]`.

    tops: f32[B, N], the largest of each block.  top: f32[N], the largest of all.
    masses, spreads: f32[N, B], sum e^x and sum x e^x of each block, x being the logits less `top`.
    """

    logits: jax.Array
    tops: jax.Array
    top: jax.Array
    masses: jax.Array
    spreads: jax.Array


def plain_in_blocks(logits, width: int) -> Blocks:
    """The reference of `in_blocks`."""
    padded = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % width)), constant_values=-jnp.inf)
    blocks = padded.reshape(len(logits), -1, width)
    x = blocks - logits.max(-1)[:, None, None]
    return Blocks(jnp.moveaxis(blocks, 0, 2), blocks.max(-1).T, logits.max(-1), jnp.exp(x).sum(-1),
                  jnp.where(x > -jnp.inf, x * jnp.exp(x), 0.0).sum(-1))


def in_blocks(logits, width: int) -> Blocks:
    """The blocks of `logits f32[N, V]`, `width` tokens each.

    Rows come last, the order in which `products.row_matmul` makes logits: maxima and sums run along memory, many rows at once.
    """
    vocab, rows = logits.shape[1], len(logits)
    blocks = jnp.pad(logits.T, ((0, -vocab % width), (0, 0)), constant_values=-jnp.inf).reshape(-1, width, rows)
    tops = jax.lax.optimization_barrier(blocks.max(1))  # or the compiler merges two maxima into one, along the vocabulary
    top = tops.max(0)
    masses, spreads = (sums.T for sums in exponential_sums(blocks - top, axis=1))
    return Blocks(blocks, tops, top, masses, spreads)


def exponential_sums(x, axis: int):
    """`(sum e^x, sum x e^x)` along an axis, -inf counting as nothing."""
    odds = jnp.exp(x)
    return odds.sum(axis), jnp.where(odds > 0, x * odds, 0.0).sum(axis)

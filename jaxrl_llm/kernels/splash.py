"""Attention in rows of trees by JAX's sparse flash attention for TPUs ("splash"): scores never leave the chip.

The mask is given in blocks, see `_masks`: blocks in which no query sees a key are skipped, blocks in which every query sees
every key are not masked, and the number of blocks in between may be at most linear in the row, see `fits`.
"""
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from jaxrl_llm.kernels.flash import Kernel, RowMask

BLOCK = 512  # most queries, and keys, of a block
LANES = 128  # a block is a multiple of this
ROOM = 8  # partly masked blocks for each block of queries: a path has 1, a prompt with its group about 3


@functools.cache
def kernel(interpret: bool = False) -> Kernel:
    """The kernel for `rows.attention`; `interpret` runs its program on any platform, slowly, for tests."""
    return Kernel(fits, functools.partial(forward, interpret), functools.partial(backward, interpret))


def serves(queries) -> bool:
    """Whether these `queries [R, K, H/K, T, d]` have a width that the kernel supports."""
    return queries.shape[-1] in (64, 128, 256)


def forward(interpret, softcap, queries, keys, values, rows: RowMask):
    """Outputs like the queries, of padding too, and logarithms of the sums `f32[R, H, T]`."""
    out, sums = jax.lax.map(lambda row: _of_row(softcap, interpret, *row), _laid(rows, queries, keys, values))
    return _unlaid(out, queries), sums[:, :, :queries.shape[-2]]


def backward(interpret, softcap, queries, keys, values, rows: RowMask, out, sums, d_out):
    """Gradients in queries, keys and values; `d_out` is 0 on padding."""
    T, N = queries.shape[-2], keys.shape[-2]
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, -T % _size(T))))
    given = *_laid(rows, queries, keys, values), _flat(out), sums, _flat(d_out)
    d_queries, d_keys, d_values = jax.lax.map(lambda row: _slopes_of_row(softcap, interpret, *row), given)
    return _unlaid(d_queries, queries), d_keys[..., :N, :], d_values[..., :N, :]


def _size(T: int) -> int:
    """Slots of a block."""
    return min(BLOCK, -(-T // LANES) * LANES)


def _flat(x):
    """`[R, K, H/K, T, d]` as `[R, H, T', d]`, T' a multiple of the block."""
    more = -x.shape[-2] % _size(x.shape[-2])
    return jnp.pad(x.reshape(len(x), -1, *x.shape[3:]), ((0, 0), (0, 0), (0, more), (0, 0)))


def _unlaid(x, queries):
    return x[..., :queries.shape[-2], :].reshape(queries.shape)


def _laid(rows: RowMask, queries, keys, values):
    """The arguments of `_of_row`: queries, keys, values, ends and positions of keys, slots and positions of queries."""
    T = queries.shape[-2]
    size = _size(T)
    end, positions, slots, own = _padded(rows, T, size)
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-2] % size), (0, 0))) for x in (keys, values))
    reach, slots = (jnp.broadcast_to(x, (len(keys), *x.shape)) for x in (rows.reach, slots))
    return _flat(queries), keys, values, (end, positions, slots, own, reach)


def _padded(rows: RowMask, T: int, size: int):
    """Ends and positions of the keys, slots and positions of the queries, up to multiples of the block."""
    def pad(x, value=0):
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=value)
    slots = rows.query_slots(jnp.arange(T + -T % size))
    return pad(rows.end), pad(rows.positions), slots, pad(rows.of_queries(rows.positions, T))


def _blocks(size: int, end, positions, slots, own, reach):
    """Of a row, `(some, all)` `bool[n, m]`: blocks in which a query may see a key, and those in which every query sees all."""
    ends, places, mine, near = (x.reshape(-1, size) for x in (end, positions, slots, own))
    keys = jnp.arange(len(end)).reshape(-1, size)
    last_slot, last_end = mine[:, -1:], jnp.where(ends > 0, ends, 0)
    some = (keys[:, 0] <= last_slot) & (last_end.max(-1) > mine[:, :1])
    some &= near.min(-1)[:, None] - jnp.where(ends > 0, places, -1).max(-1) < reach
    every = (keys[:, -1] <= mine[:, :1]) & (ends.min(-1) > last_slot)
    return some, some & every & (near.max(-1)[:, None] - places.min(-1) < reach)


def _count(size: int, *row):
    some, every = _blocks(size, *row)
    return (some & ~every).sum()


def _most(slots: int, size: int) -> int:
    return ROOM * (slots // size) + ROOM


def fits(queries, rows: RowMask):
    """Whether there is room for the masks of every row, `bool[]`."""
    T = queries.shape[-2]
    size = _size(T)
    end, positions, slots, own = _padded(rows, T, size)
    counts = jax.vmap(functools.partial(_count, size), (0, 0, None, 0, None))(end, positions, slots, own, rows.reach)
    return counts.max() <= _most(len(slots), size)


def cost(queries, keys, rows: RowMask) -> dict[str, tuple[float, float]]:
    """Of the kernels' calls for one row, by name: operations of their products, and bytes read again and again.

    Shapes are those of `forward`, with `rows` of one row whose values are known. The forward pass computes 2 products for each
    block of 512 x 512 scores that is not skipped; the backward pass 3 for the gradient of the queries and 4 for those of keys
    and values. Each reads two blocks of the other side, which are counted as often as they are read.
    """
    T, d = queries.shape[-2:]
    size = _size(T)
    end, positions, slots, own = _padded(rows, T, size)
    some, _ = _blocks(size, end[0], positions[0], slots, own[0], rows.reach)
    seen = int(some.sum()) * math.prod(queries.shape[1:3])
    again = seen * 2 * size * d * keys.dtype.itemsize
    return {f"splash_mha_{phase}": (products * 2 * size**2 * d * seen, again)
            for phase, products in (("fwd", 2), ("dq", 3), ("dkv", 4))}


def _masks(end, positions, slots, own, reach):
    """The mask of a row as the kernels read it: queries by keys, and transposed for the gradients of keys."""
    size = _size(len(slots))
    some, every = _blocks(size, end, positions, slots, own, reach)
    partly = some & ~every
    most = min(_most(len(slots), size), math.prod(partly.shape))
    queries, keys = jnp.nonzero(partly, size=most, fill_value=0)
    def part(x, i):
        return x.reshape(-1, size)[i]
    def of_block(i, j):
        q, k = part(slots, i)[:, None], part(jnp.arange(len(end)), j)
        near = part(own, i)[:, None] - part(positions, j) < reach
        return (k <= q) & (q < part(end, j)) & near
    blocks = jax.vmap(of_block)(queries, keys)
    number = jnp.where(partly, jnp.cumsum(partly.reshape(-1)).reshape(partly.shape) - 1, 0)
    kind = jnp.where(every, 2, some.astype(jnp.int32))

    def info(following, blocks):
        following = jnp.where(some, following, 0)
        small = jnp.int16 if max(most, *partly.shape) < 2**15 else jnp.int32
        following, number_of_mask = (x[None].astype(small) for x in (following, number))
        return MaskInfo(following, number_of_mask, kind[None].astype(jnp.int8), blocks, None, True)

    n, m = jnp.indices(partly.shape, jnp.int32)
    return info(m, blocks), info(n, blocks.swapaxes(1, 2))


def _settings(softcap, interpret, size: int) -> dict:
    sizes = splash.BlockSizes(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size,
                              block_kv_dq=size)
    return dict(is_mqa=False, block_sizes=sizes, mask_value=splash.DEFAULT_MASK_VALUE, attn_logits_soft_cap=softcap,
                residual_checkpoint_name=None, mask_function=None, interpret=interpret)


def _of_row(softcap, interpret, queries, keys, values, row):
    """Outputs `[H, T, d]` and logarithms of sums `f32[H, T]` of a row."""
    mask, _ = _masks(*row)
    kernel = splash.SplashAttentionKernel(mask, None, None, save_residuals=True,
                                          **_settings(softcap, interpret, _size(queries.shape[1])))
    out, (sums,) = kernel(queries, keys, values)
    return out, sums


def _slopes_of_row(softcap, interpret, queries, keys, values, row, out, sums, d_out):
    """Gradients in queries, keys and values of a row, from its outputs and logarithms of sums."""
    of_queries, of_keys = _masks(*row)
    saved = queries, keys, values, None, None, out, sums, of_queries, of_keys
    settings = _settings(softcap, interpret, _size(queries.shape[1]))
    return splash._splash_attention_bwd(False, res=saved, do=d_out, **settings)[3:6]

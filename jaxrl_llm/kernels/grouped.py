"""Products of sorted rows with one matrix for each group of rows: what experts compute.

TPUs run JAX's grouped products ("megablox"), GPUs `jax.lax.ragged_dot`. CPUs would lower the latter to products of all rows
with all matrices and keep one product per row; there, rows are computed in blocks of one group each. Measured speeds are in
docs/benchmarks.md, "Experts".
"""
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.choice import automatic_axes, by_hand, chosen, is_placed

_TILES = 128, 512, 512  # rows, and of a matrix, that the TPU's kernel works on at a time
_WHOLE = (PartitionSpec(),) * 3
_BLOCK = 8, 128  # fewest and most rows of a block: groups of fewer share the reading of a matrix with no one


def plain_grouped_matmul(x, kernels, sizes):
    """The reference of `grouped_matmul`: all rows times all kernels; one product per row is used."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    return jnp.einsum("ne,nd,edm->nm", jax.nn.one_hot(group, len(kernels)), x, kernels).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x, kernels, sizes, by="plain"):
    """`x[i] @ kernels[g]` for each row i of group g: `[n, out]` of `x [n, in]`, `kernels [E, in, out]`, `sizes i32[E]`.

    The first `sizes[0]` rows are group 0, the next `sizes[1]` group 1; sizes add up to n. The kernels' gradient adds up in
    float32. `by` is the set of kernels that computes, see `kernels.choice`.
    """
    return _forward(x, kernels, sizes, by)[0]


def _forward(x, kernels, sizes, by):
    times = times_on_tpu if _on_tpu(by) else _times
    return times(x, kernels, sizes, 1), (x, kernels, sizes)


def _backward(by, saved, dy):
    x, kernels, sizes = saved
    times, summed = (times_on_tpu, sums_on_tpu) if _on_tpu(by) else (_times, _summed)
    return times(dy, kernels, sizes, 2), summed(x, dy, sizes).astype(kernels.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _on_tpu(by: str) -> bool:
    """Whether the TPU's kernel is used: sharded matrices are left to XLA's own product, which the compiler partitions."""
    return chosen(by) == "tpu" and is_placed() and all(size == 1 for size in automatic_axes().values())


def _times(x, kernels, sizes, axis: int):
    """Rows times their kernels, summed over `axis` (1 or 2) of these."""
    def ragged(x, kernels, sizes):
        return jax.lax.ragged_dot(x, kernels if axis == 1 else jnp.swapaxes(kernels, 1, 2), sizes)

    return jax.lax.platform_dependent(
        x, kernels, sizes, default=ragged, cpu=lambda *arguments: times_by_blocks(*arguments, axis=axis))


def _summed(x, dy, sizes):
    """`x^T dy` of each group: `f32[E, in, out]`."""
    rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def ragged(x, dy, sizes):
        return jax.lax.ragged_dot_general(x, dy, sizes, rows, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(x, dy, sizes, default=ragged, cpu=sums_by_blocks)


def times_on_tpu(x, kernels, sizes, axis: int, interpret: bool = False):
    """As `ragged_dot`, summed over `axis` (1 or 2) of the kernels, by JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
    def product(rows, kernels, sizes):
        return gmm(rows, kernels, sizes, x.dtype, _TILES, transpose_rhs=axis == 2, interpret=interpret)
    return by_hand(product, (_filled(x), kernels, sizes), _WHOLE, PartitionSpec())[:len(x)]


def sums_on_tpu(x, dy, sizes, interpret: bool = False):
    """`x^T dy` of each group in float32, by JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
    def product(x, dy, sizes):
        return tgmm(x.T, dy, sizes, jnp.float32, _TILES, interpret=interpret)
    return by_hand(product, (_filled(x), _filled(dy), sizes), _WHOLE, PartitionSpec())


def _filled(x):
    """Rows padded to a multiple of the tile; rows after the last group belong to no group."""
    return jnp.pad(x, ((0, -len(x) % _TILES[0]), (0, 0)))


def times_by_blocks(x, kernels, sizes, *, axis: int = 1):
    """As `ragged_dot`, one product for each block; summed over `axis` (1 or 2) of the kernels."""
    size, (group, start, end, count) = _blocks(len(x), sizes)
    x = jnp.pad(x, ((0, size), (0, 0)))

    def one(i, out):
        rows, kernel = _rows(x, start[i], size), kernels[group[i]]
        y = jax.lax.dot_general(rows, kernel, (((1,), (axis - 1,)), ((), ())))
        own = (start[i] + jnp.arange(size) < end[i])[:, None]  # the rows after them belong to the next group
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, y, _rows(out, start[i], size)), start[i], 0)

    return jax.lax.fori_loop(0, count, one, jnp.zeros((len(x), kernels.shape[3 - axis]), x.dtype))[:-size]


def sums_by_blocks(x, dy, sizes):
    """`x^T dy` of each group in float32, one product for each block."""
    size, (group, start, end, count) = _blocks(len(x), sizes)
    x, dy = (jnp.pad(y, ((0, size), (0, 0))) for y in (x, dy))

    def one(i, total):
        own = (start[i] + jnp.arange(size) < end[i])[:, None]
        dy_rows = jnp.where(own, _rows(dy, start[i], size), 0)
        product = jax.lax.dot_general(_rows(x, start[i], size), dy_rows, (((0,), (0,)), ((), ())),
                                      preferred_element_type=jnp.float32)
        return total.at[group[i]].add(product)

    return jax.lax.fori_loop(0, count, one, jnp.zeros((len(sizes), x.shape[1], dy.shape[1]), jnp.float32))


def _blocks(n: int, sizes):
    """`(rows of a block, (group, first row, end of the group) of each block, how many blocks there are)`.

    A block has about as many rows as an average group. `i32[most]` each; those behind the count are not computed.
    """
    least, most = _BLOCK
    size = min(most, max(least, 2 ** (n // len(sizes)).bit_length() // 2))
    blocks = -(-sizes // size)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(blocks)
    number = jnp.arange(n // size + len(sizes))
    group = jnp.searchsorted(last, number, side="right").clip(max=len(sizes) - 1)
    start = (ends - sizes)[group] + size * (number - (last - blocks)[group])
    return size, (group, start, ends[group], last[-1])


def _rows(x, start, size: int):
    return jax.lax.dynamic_slice_in_dim(x, start, size)

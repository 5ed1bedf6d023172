"""Matrix products in the order that XLA computes fastest on CPUs."""
import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxrl_llm.kernels.choice import chosen

_ROW_MAJOR = Layout(major_to_minor=(0, 1))
_PARTS = 4  # of a sum, see `_by_parts`


def plain_matmul(x, kernel):
    """The reference of `matmul`, and of `row_matmul` with the kernel transposed."""
    return x @ kernel


def plain_summed(x, y, dtype=None):
    """The reference of `summed`."""
    return jnp.einsum("...rm,...rn->...mn", x, y, preferred_element_type=dtype)


@jax.custom_vjp
def matmul(x, kernel):
    """`x [..., in] @ kernel [in, out]`, with the kernel's gradient taken by `summed`.

    The built-in rule leaves the order to XLA, which on CPUs may write dy transposed first: a third of the time of a training
    step. Values and gradients are those of `x @ kernel`.
    """
    return x @ kernel


def _forward(x, kernel):
    return x @ kernel, (x, kernel)


def _backward(saved, dy):
    x, kernel = saved
    rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx = jax.lax.dot_general(dy_rows, kernel, (((1,), (1,)), ((), ()))).reshape(x.shape)
    return dx, summed(rows, dy_rows)


matmul.defvjp(_forward, _backward)


def summed(x, y, dtype=None):
    """`x^T y [..., m, n]` in `dtype`, summed over the rows of `x [..., rows, m]` and `y [..., rows, n]`.

    Computed with the narrower of the two first, which on CPUs is up to a fifth faster than last.
    """
    batch = tuple(range(x.ndim - 2))
    axes = (((x.ndim - 2,), (x.ndim - 2,)), (batch, batch))
    if x.shape[-1] <= y.shape[-1]:
        return jax.lax.dot_general(x, y, axes, preferred_element_type=dtype)
    product = jax.lax.dot_general(y, x, axes, preferred_element_type=dtype)
    return jnp.swapaxes(jax.lax.optimization_barrier(product), -1, -2)  # or the compiler would transpose the product again


def batch_matmul(left, right, axis: int):
    """Float32 products of the matrices `left [..., m, k]` with those of `right`, summed over its `axis`.

    right: `[..., k, n]` for axis 0, `[..., n, k]` for axis 1.

    On CPUs products of a few rows with large matrices, as in decoding, are sums; small ones would gain nothing by it.
    """
    m, n = left.shape[-2], right.shape[-1 - axis]
    at_once = functools.partial(_at_once, axis)
    few = m <= 16 and m * n <= 2 ** 14  # or the parts of the products take longer to write than the matrices to read
    if not few or right.size < 2 ** 18 or left.shape[-1] % _PARTS:
        return at_once(left, right)
    return jax.lax.platform_dependent(left, right, cpu=functools.partial(_by_parts, axis), default=at_once)


def _at_once(axis: int, left, right):
    batch = tuple(range(left.ndim - 2))
    axes = ((len(batch) + 1,), (len(batch) + axis,))
    return jax.lax.dot_general(left, right, (axes, (batch, batch)), preferred_element_type=jnp.float32)


def _by_parts(axis: int, left, right):
    """`_at_once` as a sum of products: its program for CPUs uses all cores, that of products alone one of them.

    With two cores a decode step of 64 rows with 160 places each is a tenth quicker.
    """
    right = jnp.swapaxes(right, -1, -2) if axis else right
    right = right.reshape(*right.shape[:-2], _PARTS, -1, right.shape[-1])
    left = jnp.moveaxis(left.reshape(*left.shape[:-1], _PARTS, -1), -2, -3)
    return _at_once(0, left, right).sum(-3)


def row_matmul(x, kernel, dtype=None):
    """`x [..., in] @ kernel^T` in `dtype` from `kernel [out, in]`: the faster order when rows are few, as in decoding.

    Computed as kernel @ x^T with both operands in their memory order. The layouts are pinned because the compiler would
    fold the transpositions into a product of another order, which takes up to twice as long on CPUs. The libraries of NVIDIA
    GPUs take any order, and pinned layouts cost them transpositions: a decode step of Qwen2.5-1.5B is 8% quicker without.
    """
    if chosen("auto") == "cuda":
        return jnp.einsum("...i,oi->...o", x, kernel, preferred_element_type=dtype)
    rows = x.reshape(-1, x.shape[-1])
    y = jnp.matmul(kernel, with_layout_constraint(rows.T, _ROW_MAJOR), preferred_element_type=dtype)
    y = with_layout_constraint(y, _ROW_MAJOR)
    return y.T.reshape(*x.shape[:-1], kernel.shape[0])


def transpose(kernel):
    """`kernel [in, out]` as `[out, in]`, written to memory in that order, once."""
    return with_layout_constraint(kernel.T, _ROW_MAJOR)


def reads_transposed(rows: int, steps: int) -> bool:
    """Whether `steps` decode steps of `rows` rows should read kernels as `[out, in]`, see `row_matmul`.

    With fewer than 64 rows some CPUs gain a fifth from it and others nothing; transposing takes as long as two or three steps.
    """
    return rows >= 64 or steps >= 64

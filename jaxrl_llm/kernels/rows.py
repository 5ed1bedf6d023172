"""Attention in rows of trees: by the platform's kernel if it supports the batch, otherwise in blocks by XLA (`flash`)."""
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels import flash
from jaxrl_llm.kernels.attention import SAVED
from jaxrl_llm.kernels.choice import automatic_axes, by_hand, chosen, is_placed
from jaxrl_llm.kernels.flash import Kernel, RowMask


def attention(kernels: str, softcap, queries, keys, values, rows: RowMask):
    """As `flash.flash_attention`, by the set of `kernels`, see `kernels.choice`."""
    kernel = _kernel_of(chosen(kernels), softcap, queries, rows)
    if kernel is None:
        return flash.flash_attention(softcap, queries, keys, values, rows)
    return by_kernel(kernel, softcap, queries, keys, values, rows)


def _kernel_of(kernels: str, softcap, queries, rows: RowMask) -> Kernel | None:
    """Imported where they are used: programs for CPUs need none of them."""
    if kernels == "tpu" and is_placed():
        from jaxrl_llm.kernels import splash
        return splash.kernel() if splash.serves(queries) else None
    if kernels == "cuda":
        from jaxrl_llm.kernels import cudnn
        return cudnn.kernel() if rows.begin is None and cudnn.serves(queries, softcap) else None
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_kernel(kernel: Kernel, softcap, queries, keys, values, rows: RowMask):
    """As `flash.flash_attention`, by `kernel` if it fits the rows, which the program checks at run time."""
    return _forward(kernel, softcap, queries, keys, values, rows)[0]


def _forward(kernel, softcap, queries, keys, values, rows):
    def by_blocks(*arrays):
        out, tops, inverses = flash.forward(softcap, *arrays, rows)
        sums = tops - jnp.log(jnp.where(inverses > 0, inverses, 1.0))
        return out, sums.reshape(len(out), -1, out.shape[-2])

    def whole(*arrays):
        return _by_hand(functools.partial(kernel.forward, softcap), rows, *arrays)

    out, sums = jax.lax.cond(kernel.fits(queries, rows), whole, by_blocks, queries, keys, values)
    out, sums = checkpoint_name((jnp.where(_real(queries, rows), out, 0), sums), SAVED)
    return out, (queries, keys, values, rows, out, sums)


def _backward(kernel, softcap, saved, d_out):
    *arrays, rows, out, sums = saved
    real = _real(arrays[0], rows)

    def by_blocks(queries, keys, values, out, sums, d_out):
        sums = sums.reshape(*queries.shape[:-1], 1)
        seen = jnp.broadcast_to(real, sums.shape).astype(jnp.float32)
        return flash.backward(softcap, (queries, keys, values, rows, out, sums, seen), d_out)[:3]

    def whole(queries, keys, values, out, sums, d_out):
        return _by_hand(functools.partial(kernel.backward, softcap), rows, queries, keys, values, out, sums, d_out)

    given = *arrays, out, sums, jnp.where(real, d_out, 0)
    return *jax.lax.cond(kernel.fits(arrays[0], rows), whole, by_blocks, *given), None


by_kernel.defvjp(_forward, _backward)


def _by_hand(f, rows: RowMask, queries, keys, values, *others):
    """`f(queries, keys, values, rows, *others)` under `shard_map` along axes that the compiler would otherwise partition.

    Each device along `tensor` has its own heads, on axis 1 of every array, if `tensor` divides the number of key heads.
    """
    heads = PartitionSpec(None, "tensor") if keys.shape[1] % automatic_axes().get("tensor", 1) == 0 else PartitionSpec()
    arrays = queries, keys, values, *others
    def of_shard(rows, queries, keys, values, *others):
        return f(queries, keys, values, rows, *others)
    return by_hand(of_shard, (rows, *arrays), (PartitionSpec(), *(heads for _ in arrays)), heads)


def _real(queries, rows: RowMask):
    """`bool[R, 1, 1, T, 1]`, queries that are not padding: each of them sees itself."""
    return (rows.of_queries(rows.end, queries.shape[-2]) > 0)[:, None, None, :, None]

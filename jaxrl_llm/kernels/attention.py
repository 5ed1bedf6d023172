"""Softmax attention in blocks of queries, with a backward pass that starts from its outputs, maxima and sums."""
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.kernels.int8 import Int8
from jaxrl_llm.kernels.products import batch_matmul, summed

MASKED = -1e30  # added to the scores of keys that a query does not see; finite, or a query that sees none would get NaN
BLOCK = 512  # queries of a row whose scores exist at the same time
SAVED = "attention"  # name of the arrays that the backward pass of `attention` starts from


def plain_attention(softcap, queries, sources):
    """The reference of `attention`: one softmax over all keys, whose scores exist at once, and the built-in gradients."""
    P, _, G = queries.shape[:3]
    def of_rows(y):  # [P, K, G, U, d]
        return y if y.ndim == 5 else jnp.repeat(jnp.repeat(y, P // len(y), axis=0)[:, :, None], G, axis=2)

    keys, values, rows, biases = zip(*sources)
    products = [jnp.einsum("pkghtd,pkgud->pkghtu", queries, of_rows(k), preferred_element_type=jnp.float32) for k in keys]
    scores = jnp.concatenate([capped(x, softcap) + bias(own) for x, bias, own in zip(products, biases, rows)], axis=-1)
    weights = jnp.where(scores.max(-1, keepdims=True) > MASKED / 2, jax.nn.softmax(scores), 0.0)
    values = jnp.concatenate([of_rows(v) for v in values], axis=3)
    return jnp.einsum("pkghtu,pkgud->pkghtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
                      ).astype(values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(softcap, queries, sources):
    """Attention of `queries [P, K, G, H/K, T, d]` over all `sources`, each `(keys, values, rows, bias)`.

    Keys and values belong to a row, `[P, K, G, U, d]`, to a group, `[P, K, S, d]`, or to n consecutive groups,
    `[P/n, K, S, d]`; where no gradient is taken they may be `Int8`. `bias(rows) -> [P, 1, G, 1, t, U]` gives the bias of a
    block of t queries from the block's part of `rows`, arrays with queries on axis -2.

    The backward pass starts from the outputs, maxima and inverse sums: weights then take one exponential of the scores, and the
    softmax's sum subtracts `d_out . out` of the query from a gradient (arXiv 2205.14135, appendix B). These three carry the
    name `SAVED`, for a checkpoint policy. Biases have no gradient.
    """
    return _forward(softcap, queries, sources)[0]


def _forward(softcap, queries, sources):
    keys, values, rows, biases = zip(*sources)

    def block(part):
        queries, rows = part
        scores = [_biased(_scores(softcap, queries, k), queries, k, bias, own) for k, bias, own in zip(keys, biases, rows)]
        top = functools.reduce(jnp.maximum, [_of_rows(s.max(-1, keepdims=True), queries) for s in scores])
        odds = [jnp.exp(s - _rows(top, k)) for s, k in zip(scores, keys)]
        total = sum(_of_rows(o.sum(-1, keepdims=True), queries) for o in odds)
        inverse = jnp.where(top > MASKED / 2, 1 / total, 0.0)
        out = sum(_of_rows(_weighted(o, v, queries.dtype), queries) for o, v in zip(odds, values)) * inverse
        return (out.astype(queries.dtype), top, inverse), ()

    out, top, inverse = checkpoint_name(_by_blocks(block, (queries, rows))[0], SAVED)
    return out, (queries, sources, out, top, inverse)


def _backward(softcap, saved, d_out):
    queries, sources, *kept = saved
    keys, values, rows, biases = zip(*sources)

    def block(part):
        queries, rows, out, top, inverse, d_out = part
        lost = jnp.sum(d_out.astype(jnp.float32) * out, -1, keepdims=True)
        d_queries, sums = 0.0, []
        for k, v, bias, own in zip(keys, values, biases, rows):
            scores = _scores(softcap, queries, k)
            weights = jnp.exp(_biased(scores, queries, k, bias, own) - _rows(top, k)) * _rows(inverse, k)
            slopes = weights * (batch_matmul(_rows(d_out, v), v, 1) - _rows(lost, v))
            if softcap is not None:
                slopes *= 1 - (scores / softcap) ** 2
            d_queries += _of_rows(batch_matmul(slopes.astype(k.dtype), k, 0), queries)
            sums.append((summed(slopes.astype(queries.dtype), _rows(queries, k), jnp.float32),
                         summed(weights.astype(d_out.dtype), _rows(d_out, v), jnp.float32)))
        return d_queries.astype(queries.dtype), sums

    d_queries, sums = _by_blocks(block, (queries, rows, *kept, d_out))
    return d_queries, [(d_k.astype(k.dtype), d_v.astype(v.dtype), None, None) for (d_k, d_v), k, v in zip(sums, keys, values)]


attention.defvjp(_forward, _backward)


def _by_blocks(f, rows):
    """`f(rows) -> (rows, sums)` over blocks of `BLOCK` queries, so that memory does not grow with their square.

    Queries are on axis -2 of every input and output array of `rows`; sums are taken over all blocks.
    """
    T = rows[0].shape[-2]
    if T <= BLOCK:
        return f(rows)

    def split(x):
        x = jnp.broadcast_to(x, (*x.shape[:-2], T, x.shape[-1]))  # a bias may be the same for all queries
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, -T % BLOCK), (0, 0)))
        return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1]), -3, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :T, :]

    def add(sums, block):
        output, more = f(block)
        return jax.tree.map(jnp.add, sums, more), output

    blocks = jax.tree.map(split, rows)
    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], blocks))[1]
    sums, outputs = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), blocks)
    return jax.tree.map(join, outputs), sums


def score_products(queries, keys):
    """Float32 products of `queries [..., d]` with `keys [..., U, d]`: `[..., U]`, one matrix product for each matrix of keys.

    The queries are the left operand in their memory order: an einsum may choose the other order, at several times the cost.
    """
    return _of_rows(batch_matmul(_rows(queries, keys), keys, 1), queries)


def _scores(softcap, queries, keys):
    """Scores in the shape of their product, one matrix for each of the keys: TPUs copy them for another one."""
    if isinstance(keys, Int8):
        numbers = keys.numbers.astype(queries.dtype)
        return capped(batch_matmul(_rows(queries, keys), numbers, 1) * jnp.swapaxes(keys.scale, -1, -2), softcap)
    return capped(batch_matmul(_rows(queries, keys), keys, 1), softcap)


def _weighted(weights, values, dtype):
    """The product of weights, matrices as `_scores` gives them, with values, computed in `dtype`."""
    if isinstance(values, Int8):
        weights, values = weights * jnp.swapaxes(values.scale, -1, -2), values.numbers
    return batch_matmul(weights.astype(dtype), values.astype(dtype), 0)


def _biased(scores, queries, keys, bias, rows):
    scores, rows = jax.lax.optimization_barrier((scores, rows))  # or the bias of all blocks is made outside the loops
    return _rows(_of_rows(scores, queries) + bias(rows), keys)


def capped(scores, softcap):
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def weighted_sum(weights, values):
    """`weights [..., U]` times `values [..., U, d]`: `f32[..., d]`."""
    return _of_rows(batch_matmul(_rows(weights, values).astype(values.dtype), values, 0), weights)


def summed_rows(weights, rows, keys):
    """`weights [..., U]`, transposed, times `rows [..., d]`: in the shape of `keys [..., U, d]`, float32."""
    return summed(_rows(weights, keys).astype(rows.dtype), _rows(rows, keys), jnp.float32)


def _rows(x, keys):
    """`[..., a, b, c, n]` as the rows of one matrix for each of the `keys [..., U, d]`, which consecutive groups may share."""
    if keys.shape[0] < len(x):
        x = jnp.moveaxis(x.reshape(keys.shape[0], -1, *x.shape[1:]), 1, 2)
    return x.reshape(*keys.shape[:-2], -1, x.shape[-1])


def _of_rows(product, x):
    """The inverse of `_rows`: a product `[..., U]` of the rows of `x [..., n]`, in the shape of `x`."""
    if len(product) < len(x):
        product = product.reshape(len(product), x.shape[1], -1, *x.shape[2:-1], product.shape[-1])
        product = jnp.moveaxis(product, 2, 1)
    return product.reshape(*x.shape[:-1], product.shape[-1])

"""Log-probs and entropies of given tokens in chunks of rows, so that no `[tokens, V]` array outlives a chunk."""
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.products import summed
from jaxrl_llm.kernels.vocabulary import exponential_sums


def token_logprobs(normed, unembedding, tokens, *, temperature: float | jax.Array = 1.0, divisor: float = 1.0,
                   softcap: float | None = None, chunk: int = 512, wanted=None, slopes: bool = False,
                   position: Callable | None = None, seeds=None):
    """Log-prob of each token and entropy of its distribution, softmax(h W^T / temperature), in float32.

    The backward pass computes each chunk's logits again: memory is one chunk of logits, whatever the vocabulary.

    Args:
      normed: `[N, D]` final normed states.
      unembedding: `[V, D]`, cast to the dtype of `normed`; its gradient adds up in its own dtype.
      tokens: `i32[N]`.
      temperature: the sampler's temperature, so that both log-probs describe the same distribution: a number, which is
        compiled in, or `f32[N]`, one per token, which is not. It gets no gradient.
      divisor, softcap: the model's, see `finished`.
      chunk: rows per chunk.
      wanted: `bool[N]`; chunks without any wanted row are not computed and give 0. None: all are.
      slopes: whether entropies carry a gradient too, the exact one through all logits.
      position: `(logits f32[V], token i32[], seed u32[]) -> f32[]`, a function of the logits at one position, after their
        division by the temperature; it is differentiated by them, and computed again in the backward pass.
      seeds: `u32[N]`, those of the positions; None: all are 0.
    Returns:
      `(logprobs f32[N], entropies f32[N])`, and with a `position` its values f32[N] behind them.
    """
    chex.assert_rank([normed, unembedding, tokens], [2, 2, 1])
    fixed, each = (temperature, None) if np.ndim(temperature) == 0 else (None, temperature)
    if position is not None:
        seeds = jnp.zeros(tokens.shape, jnp.uint32) if seeds is None else seeds
    shape = fixed, divisor, softcap, slopes, position
    return _token_logprobs(shape, min(chunk, len(tokens)), normed, unembedding, tokens, wanted, each,
                           None if position is None else seeds)


def most_likely(normed, unembedding, *, chunk: int = 512):
    """The token with the largest logit, `i32[N]`, of final normed states `[N, D]`; `unembedding`: `[V, D]`.

    The model's divisor and softcap, see `finished`, do not change the order of the logits.
    """
    chunk, matrix = min(chunk, len(normed)), unembedding.astype(normed.dtype)
    return jax.lax.map(lambda h: jnp.argmax(_logits(h, matrix, 1.0, None), axis=-1).astype(jnp.int32),
                       _chunks(normed, chunk)).reshape(-1)[:len(normed)]


def logit_gradients(normed, unembedding, tokens, *, temperature: float | jax.Array = 1.0, divisor: float = 1.0,
                    softcap: float | None = None, chunk: int = 512):
    """Squared norm of the gradient of each token's log-prob, `1 - 2 p(token) + sum_v p(v)^2`, f32[N].

    p = softmax(h W^T / temperature), and the gradient is with respect to the logits after their division by the temperature.
    Arguments: as of `token_logprobs`.
    """
    chunk, matrix = min(chunk, len(tokens)), unembedding.astype(normed.dtype)
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), len(tokens))

    def one_chunk(rows):
        h, targets, temperatures = rows
        chances = jax.nn.softmax(_logits(h, matrix, divisor, softcap) / temperatures[:, None], axis=-1)
        hit = targets[:, None] == jnp.arange(unembedding.shape[0])
        return jnp.square(hit - chances).sum(-1)

    rows = _chunks(normed, chunk), _chunks(tokens, chunk), _filled_up(temperatures, chunk)
    return jax.lax.map(one_chunk, rows).reshape(-1)[:len(tokens)]


def finished(products, divisor: float, softcap: float | None):
    """Logits from the products of states and unembedding: y = products / divisor, then softcap * tanh(y / softcap) if given."""
    logits = products if divisor == 1.0 else products / divisor
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_logprobs(shape, chunk, normed, unembedding, tokens, wanted, temperatures, seeds):
    return _forward(shape, chunk, normed, unembedding, tokens, wanted, temperatures, seeds)[0]


def _forward(shape, chunk, normed, unembedding, tokens, wanted, temperatures, seeds):
    matrix = unembedding.astype(normed.dtype)  # outside the loops, as compilers cast it once for each chunk otherwise

    def one_chunk(h, targets, temperatures, seeds):
        logits = _logits(h, matrix, *shape[1:3]) / (shape[0] if temperatures is None else temperatures[:, None])
        top = logits.max(-1, keepdims=True)
        shifted = logits - top
        total, spread = exponential_sums(shifted, axis=1)
        normalizers = top[:, 0] + jnp.log(total)
        logprobs = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - normalizers
        values = () if seeds is None else (jax.vmap(shape[4])(logits, targets, seeds),)
        return logprobs, jnp.log(total) - spread / total, normalizers, *values

    rows = (_chunks(normed, chunk), _chunks(tokens, chunk), _filled_up(temperatures, chunk),
            None if seeds is None else _chunks(seeds, chunk))
    if wanted is None:
        results = jax.lax.map(lambda rows: one_chunk(*rows), rows)
    else:
        def nothing(h, targets, temperatures, seeds):
            return (jnp.zeros(chunk, jnp.float32),) * (3 if seeds is None else 4)
        results = jax.lax.map(lambda x: jax.lax.cond(x[0].any(), one_chunk, nothing, *x[1]), (_chunks(wanted, chunk), rows))
    logprobs, entropies, normalizers, *values = (x.reshape(-1)[:len(tokens)] for x in results)
    kept = entropies if shape[3] else None
    return (logprobs, entropies, *values), (normed, unembedding, tokens, normalizers, kept, wanted, temperatures, seeds)


def _backward(shape, chunk, saved, cotangents):
    """d logprob_n / d logits_nv = [v = token_n] - softmax_nv, from the saved normalisers: nothing is reduced over V again.

    d entropy_n / d logits_nv = -softmax_nv (log softmax_nv + entropy_n), for entropies with slopes. A function of one position
    has the derivative that JAX finds.
    """
    normed, unembedding, tokens, normalizers, entropies, wanted, temperatures, seeds = saved
    (fixed, divisor, softcap, slopes, position), matrix = shape, unembedding.astype(normed.dtype)

    def one_chunk(total, rows):
        h, targets, normalizers, cotangents, temperatures, of_position, *of_entropies = rows
        temperature = fixed if temperatures is None else temperatures
        logits = _logits(h, matrix, divisor, softcap)
        shifted = logits / (fixed if temperatures is None else temperatures[:, None]) - normalizers[:, None]
        chances = jnp.exp(shifted)
        hit = targets[:, None] == jnp.arange(unembedding.shape[0])
        slope = (hit - chances) * (cotangents / (temperature * divisor))[:, None]
        if slopes:
            entropies, weights = of_entropies
            slope = slope - chances * (shifted + entropies[:, None]) * (weights / (temperature * divisor))[:, None]
        if position is not None:
            seeds, weights = of_position
            scaled = logits / (fixed if temperatures is None else temperatures[:, None])
            _, pull_back = jax.vjp(lambda scaled: jax.vmap(position)(scaled, targets, seeds), scaled)
            slope = slope + pull_back(weights)[0] / jnp.broadcast_to(temperature * divisor, weights.shape)[:, None]
        slope = (slope if softcap is None else slope * (1 - (logits / softcap) ** 2)).astype(h.dtype)
        dh = jnp.matmul(slope, matrix, preferred_element_type=jnp.float32)
        return total + summed(h, slope, jnp.float32).astype(total.dtype), dh.astype(h.dtype)

    def one_wanted(total, rows):
        def nothing(total, rows):
            return (total, jnp.zeros_like(rows[0]))
        return jax.lax.cond(rows[0].any(), one_chunk, nothing, total, rows[1])

    rows = [*(_chunks(x, chunk) for x in (normed, tokens, normalizers, cotangents[0])), _filled_up(temperatures, chunk),
            None if position is None else (_chunks(seeds, chunk), _chunks(cotangents[2], chunk)),
            *((_chunks(x, chunk) for x in (entropies, cotangents[1])) if slopes else ())]
    each, rows = (one_chunk, rows) if wanted is None else (one_wanted, (_chunks(wanted, chunk), rows))
    # Summed as [D, V], the order in which `summed` finds each chunk's part.
    d_unembedding, d_normed = jax.lax.scan(each, jnp.zeros_like(unembedding.T), rows)
    return d_normed.reshape(-1, normed.shape[1])[:len(tokens)], d_unembedding.T, None, None, None, None


_token_logprobs.defvjp(_forward, _backward)


def _logits(h, matrix, divisor, softcap):
    products = jnp.einsum("nd,vd->nv", h, matrix, preferred_element_type=jnp.float32)
    return finished(products, divisor, softcap)


def _chunks(x, chunk: int):
    """`[N, ...]` as `[N / chunk, chunk, ...]`, filled up with zeros."""
    return jnp.pad(x, ((0, -len(x) % chunk), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])


def _filled_up(temperatures, chunk: int):
    """As `_chunks`, filled up with ones, by which logits can be divided; None stays None."""
    if temperatures is None:
        return None
    return jnp.pad(temperatures, (0, -len(temperatures) % chunk), constant_values=1).reshape(-1, chunk)

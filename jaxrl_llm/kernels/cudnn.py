"""Attention by cuDNN's flash attention on NVIDIA GPUs: for rows that are one path, and for groups that share a prompt.

Queries attend to one source of keys at a time; results are merged by l, the logarithm of the sum of a source's exponentials:
over all keys `l = log(e^a + e^b)`, out = e^(a - l) out_a + e^(b - l) out_b. Gradients start from out and l over all keys, and
are the same for every source: `weight = exp(score - l)`, `slope = weight (d_out . value - d_out . out)` (arXiv 2205.14135).

`jax.nn.dot_product_attention` calls the same kernels, but rounds l to the dtype of the outputs and gives it no gradient. This
module calls the functions underneath it, which JAX does not promise to keep, or with `implementation="xla"` a plain computation
of the same.
"""
import contextlib
import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.attention import SAVED
from jaxrl_llm.kernels.flash import FAR, Kernel, RowMask

fused: Any = None
with contextlib.suppress(ImportError):
    fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
_NEEDED = ("dot_product_attention", "_dot_product_attention_bwd_rule", "_normalize_layout", "check_cudnn_version", "MaskType")
_GRADIENT = "scale seed dropout_rate variadic_args mask_type layout sliding_window_length {} return_residual res grad_output"
_GRADIENTS = [tuple(_GRADIENT.format(part).split()) for part in ("is_training", "score_mod cudnn_version")]  # up to 0.11, 0.12


def serves(queries, softcap) -> bool:
    """Whether cuDNN has a kernel for these `queries [..., d]`: 16-bit numbers, d a multiple of 8 up to 128, no soft cap.

    Raises NotImplementedError if it has, and this version of JAX has no functions that call it.
    """
    fits = softcap is None and queries.dtype.itemsize == 2 and queries.shape[-1] % 8 == 0 and queries.shape[-1] <= 128
    missing = [name for name in _NEEDED if not hasattr(fused, name)]
    if fits and (missing or _gradient_parameters() not in _GRADIENTS):
        lacks = f"lacks {', '.join(missing)}" if missing else "has another gradient of attention, with the parameters " + (
            ", ".join(_gradient_parameters()))
        raise NotImplementedError(f"the kernels 'cuda' call cuDNN by functions of jax._src.cudnn, and JAX {jax.__version__} "
                                  f"{lacks}; set model.kernels=plain, or install a version of JAX that docs/scaling.md names")
    return fits


def _gradient_parameters() -> tuple[str, ...]:
    """The parameters of JAX's gradient of attention, which differ between versions."""
    return tuple(inspect.signature(fused._dot_product_attention_bwd_rule).parameters)


def forward(implementation: str, layout: str, queries, keys, values, lengths, causal: bool):
    """Outputs like the queries, and logarithms of sums `f32[B, H, T]`.

    Args:
      implementation: "cudnn" or "xla".
      layout: "BTNH", queries `[B, T, H, d]` and keys `[B, S, K, d]`; or "BNTH".
      lengths: `i32[B]`, how many keys of each batch entry count, from the first on; None: all.
      causal: whether query t sees keys up to t alone.
    """
    if implementation == "xla":
        return _plain_forward(layout, queries, keys, values, lengths, causal)
    return fused.dot_product_attention(
        queries, keys, values, q_seqlen=_all(queries, layout, lengths), kv_seqlen=lengths, scale=1.0,
        mask_type=_mask(lengths, causal), qkv_layout=layout, return_residual=True)


def backward(implementation: str, layout: str, queries, keys, values, lengths, causal: bool, out, sums, d_out):
    """Gradients in queries, keys and values; `out` and `sums` are over the keys of all sources."""
    if implementation == "xla":
        return _plain_backward(layout, queries, keys, values, lengths, causal, out, sums, d_out)
    empty = jnp.zeros(0, queries.dtype)
    counts = (empty, empty) if lengths is None else (_all(queries, layout, lengths), lengths)
    modified = "score_mod" in _gradient_parameters()  # JAX 0.12 lets scores be modified, by a function of further arrays
    saved = queries, keys, values, empty, *counts, empty, empty, empty, empty, *([()] if modified else []), sums, out
    kind = fused._normalize_layout(layout).value
    return fused._dot_product_attention_bwd_rule(1.0, 42, 0.0, (False, False), _mask(lengths, causal), kind, None,
                                                 *([None] if modified else []), fused.check_cudnn_version(), False, saved,
                                                 d_out)[:3]


def _mask(lengths, causal: bool):
    kinds = fused.MaskType
    if lengths is None:
        return kinds.CAUSAL if causal else kinds.NO_MASK
    return kinds.PADDING_CAUSAL if causal else kinds.PADDING


def _all(queries, layout: str, lengths):
    """Lengths of queries if all of them count."""
    return None if lengths is None else jnp.full(len(queries), queries.shape[layout.index("T")], jnp.int32)


def _scores(layout: str, queries, keys, lengths, causal: bool):
    """`f32[B, K, H/K, T, S]`, and queries `[B, K, H/K, T, d]` and a function that lays keys `[B, K, S, d]`."""
    def heads_first(x):
        return x if layout == "BNTH" else jnp.swapaxes(x, 1, 2)
    keys = heads_first(keys)
    grouped = heads_first(queries)
    grouped = grouped.reshape(len(keys), keys.shape[1], -1, *grouped.shape[2:])
    scores = jnp.einsum("bkhtd,bksd->bkhts", grouped, keys, preferred_element_type=jnp.float32)
    T, S = scores.shape[-2:]
    seen = jnp.arange(S) < (S if lengths is None else lengths[:, None, None, None, None])
    seen &= (jnp.arange(S) <= jnp.arange(T)[:, None]) | (not causal)
    return jnp.where(seen, scores, -jnp.inf), grouped, heads_first


def _plain_forward(layout, queries, keys, values, lengths, causal):
    scores, _, heads_first = _scores(layout, queries, keys, lengths, causal)
    sums = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bkhts,bksd->bkhtd", jnp.exp(scores - sums[..., None]), heads_first(values))
    out = heads_first(out.reshape(len(out), -1, *out.shape[3:])).astype(values.dtype)
    return out, sums.reshape(len(sums), -1, sums.shape[-1])


def _plain_backward(layout, queries, keys, values, lengths, causal, out, sums, d_out):
    scores, grouped, heads_first = _scores(layout, queries, keys, lengths, causal)
    keys, values = heads_first(keys), heads_first(values)
    def of_heads(x):
        return heads_first(x).reshape(grouped.shape)
    weights = jnp.exp(scores - sums.reshape(*grouped.shape[:-1], 1))
    d_out, lost = of_heads(d_out), (of_heads(d_out) * of_heads(out)).sum(-1, keepdims=True)
    slopes = weights * (jnp.einsum("bkhtd,bksd->bkhts", d_out, values) - lost)
    d_queries = jnp.einsum("bkhts,bksd->bkhtd", slopes, keys)
    d_queries = heads_first(d_queries.reshape(len(keys), -1, *d_queries.shape[3:])).astype(queries.dtype)
    d_keys, d_values = (jnp.einsum("bkhts,bkhtd->bksd", a, b) for a, b in ((slopes, grouped), (weights, d_out)))
    return d_queries, heads_first(d_keys).astype(keys.dtype), heads_first(d_values).astype(values.dtype)


# --- rows that are one path -----------------------------------------------------------------------------------------------


@functools.cache
def kernel(implementation: str = "cudnn") -> Kernel:
    """The kernel for `rows.attention`, of rows in which every token sees all before it, without windows."""
    def of_rows(queries, keys, values, rows):
        return queries.reshape(len(queries), -1, *queries.shape[3:]), keys, values, (rows.end > 0).sum(-1, dtype=jnp.int32)

    def run(softcap, queries, keys, values, rows):
        out, sums = forward(implementation, "BNTH", *of_rows(queries, keys, values, rows), True)
        return out.reshape(queries.shape), sums

    def slopes(softcap, queries, keys, values, rows, out, sums, d_out):
        flat = [x.reshape(len(x), -1, *x.shape[3:]) for x in (out, d_out)]
        gradients = backward(implementation, "BNTH", *of_rows(queries, keys, values, rows), True, flat[0], sums, flat[1])
        return gradients[0].reshape(queries.shape), *gradients[1:]

    return Kernel(one_path, run, slopes)


def one_path(queries, rows: RowMask):
    """Whether every row is one path with its padding behind it, `bool[]`."""
    length = (rows.end > 0).sum(-1, keepdims=True)
    wanted = jnp.where(jnp.arange(rows.end.shape[1]) < length, length, 0)
    return (rows.end == wanted).all() & (rows.reach >= FAR) & (length > 0).all()


# --- groups that share a prompt -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def group_attention(implementation: str, queries, own, shared, lengths):
    """Attention of scaled `queries [P, G, T, H, d]` over their own keys up to themselves and over their prompt's keys.

    Args:
      implementation: "cudnn" or "xla".
      own: keys and values, `[P, G, T, K, d]`.
      shared: keys and values, `[P, S, K, d]`, of which the first `lengths i32[P]` count, at least one.
    Returns:
      `[P, G, T, H, d]`.
    """
    return _group_forward(implementation, queries, own, shared, lengths)[0]


def _as_rows(x):
    return x.reshape(-1, *x.shape[2:])


def _as_prompts(x):
    return x.reshape(len(x), -1, *x.shape[3:])


def _group_forward(implementation, queries, own, shared, lengths):
    P, G, T, H, _ = queries.shape
    mine, a = forward(implementation, "BTNH", _as_rows(queries), *map(_as_rows, own), None, True)
    theirs, b = forward(implementation, "BTNH", _as_prompts(queries), *shared, lengths, False)
    a, b = a.reshape(P, G, H, T), jnp.moveaxis(b.reshape(P, H, G, T), 1, 2)
    sums = jnp.logaddexp(a, b)
    def share(part):
        return jnp.swapaxes(jnp.exp(part - sums), 2, 3)[..., None]
    out = share(a) * mine.reshape(queries.shape) + share(b) * theirs.reshape(queries.shape)
    out, sums = jax.ad_checkpoint.checkpoint_name((out.astype(queries.dtype), sums), SAVED)
    return out, (queries, own, shared, lengths, out, sums)


def _group_backward(implementation, saved, d_out):
    queries, own, shared, lengths, out, sums = saved
    P, G, T, H, _ = queries.shape
    of_rows = _as_rows(out), sums.reshape(P * G, H, T), _as_rows(d_out)
    of_prompts = _as_prompts(out), jnp.moveaxis(sums, 1, 2).reshape(P, H, G * T), _as_prompts(d_out)
    d_mine, *d_own = backward(implementation, "BTNH", _as_rows(queries), *map(_as_rows, own), None, True, *of_rows)
    d_theirs, *d_shared = backward(implementation, "BTNH", _as_prompts(queries), *shared, lengths, False, *of_prompts)
    d_queries = d_mine.reshape(queries.shape).astype(jnp.float32) + d_theirs.reshape(queries.shape)
    return d_queries.astype(queries.dtype), tuple(x.reshape(y.shape) for x, y in zip(d_own, own)), tuple(d_shared), None


group_attention.defvjp(_group_forward, _group_backward)

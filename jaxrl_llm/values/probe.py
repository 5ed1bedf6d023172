"""Small regressions from features to a value, refitted from scratch on a table of rows: the probes of POISE (arXiv 2605.07579).

A probe is a pair of pure functions. Rows are padded: `real` says which count. Fits use fixed random seeds, so equal tables
give equal probes.
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_llm.maths import masked
from jaxrl_llm.tools.registry import one_of
from jaxrl_llm.values import hl_gauss, linear

Params = Any
_HIDDEN = 64      # units of the mlp's layer
_BINS = 51        # of the histogram, HL-Gauss's number for language models
_ITERATIONS = 50  # of L-BFGS, far beyond what these convex problems need


class Probe(NamedTuple):
    """`fit(features [N, F], labels [N], real bool[N], group i32[N]) -> params`; `predict(params, features [N, F]) -> [N]`.

    `group` tells which rows belong together (one prompt): an ensemble never stacks on outputs for prompts it was fitted to.
    """

    fit: Callable[[Array, Array, Array, Array], Params]
    predict: Callable[[Params, Array], Array]

    def blank(self, rows: int, columns: int) -> Params:
        """Parameters of the right shapes for a table of `rows x columns`, all zero: a probe before its first fit."""
        table = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        def column(dtype):
            return jax.ShapeDtypeStruct((rows,), dtype)
        shapes = jax.eval_shape(self.fit, table, column(jnp.float32), column(jnp.bool_), column(jnp.int32))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make(name: str | Sequence[str] = "ridge", *, sizes: tuple[int, ...], alpha: float = 100.0, ensemble: str = "mean",
         components: Sequence[int] | None = None, low: float = 0.0, high: float = 1.0) -> Probe:
    """The probe called `name`, or an ensemble of several.

    Args:
      name: `ridge`: least squares with penalty `alpha |w|^2` and a free intercept. `sigmoid_bce`: logistic regression on soft
        labels, mean loss + `alpha / (2 N) |w|^2`. `mlp`: one hidden layer, squared error. `hl_gauss`: cross-entropy on
        histograms, same penalty as `sigmoid_bce`.
      sizes: widths of the blocks that the columns consist of, for `components`.
      alpha: penalty, for standardised features.
      ensemble: of several names: `mean` of their outputs, or `stack`, a ridge regression on their outputs for prompts that
        they were not fitted to.
      components: principal components kept of the first blocks; None keeps all columns.
      low, high: range of the values; predictions are clipped to it.
    Raises ValueError: unknown names, alpha not positive, an empty range, more numbers in `components` than blocks.
    """
    names = (name,) if isinstance(name, str) else tuple(name)
    makers = {"ridge": _ridge, "sigmoid_bce": _sigmoid_bce, "mlp": _mlp, "hl_gauss": _hl_gauss}
    for one in names:
        one_of("probe", one, makers)
    one_of("ensemble", ensemble, ("mean", "stack"))
    if not names or not alpha > 0 or not low < high:
        raise ValueError(f"probe={name!r}, alpha={alpha}, low={low}, high={high}: at least one name, alpha > 0, low < high")
    components = tuple(components or ())
    if len(components) > len(sizes):
        raise ValueError(f"components={components} for {len(sizes)} blocks of columns: give at most one number per block")
    kept = components + (None,) * (len(sizes) - len(components))
    probes = [_scaled(makers[one](alpha=alpha, low=low, high=high), sizes, kept, low, high) for one in names]
    if len(probes) == 1:
        return probes[0]
    return _mean(probes) if ensemble == "mean" else _stack(probes, alpha, low, high)


def _scaled(inner: Probe, sizes, components, low, high) -> Probe:
    """`inner` on standardised columns, padding rows 0, and with predictions in range."""
    def fit(features, labels, real, group):
        scaler = linear.fit_scaler(features, real, sizes, components)
        x = jnp.where(real[:, None], linear.scaled(scaler, features, sizes), 0.0)
        return scaler, inner.fit(x, jnp.where(real, labels, 0.0), real, group)

    def predict(params, features):
        scaler, fitted = params
        return jnp.clip(inner.predict(fitted, linear.scaled(scaler, features, sizes)), low, high)

    return Probe(fit, predict)


def _product(x, weights):
    return jnp.matmul(x, weights, precision=linear.EXACT)


def _ridge(*, alpha, low, high) -> Probe:
    def fit(x, y, real, group):
        intercept = masked.mean(y, real)
        return {"weights": linear.ridge_weights(x, jnp.where(real, y - intercept, 0.0), alpha), "intercept": intercept}

    return Probe(fit, lambda params, x: _product(x, params["weights"]) + params["intercept"])


def _sigmoid_bce(*, alpha, low, high) -> Probe:
    def fit(x, y, real, group):
        y, n = jnp.clip((y - low) / (high - low), 0.0, 1.0), jnp.maximum(masked.count(real, dtype=x.dtype), 1.0)

        def loss(params):
            logits = _product(x, params["weights"]) + params["intercept"]
            bce = masked.sum(optax.sigmoid_binary_cross_entropy(logits, y), real)
            return (bce + alpha / 2 * jnp.sum(params["weights"] ** 2)) / n

        rate = jnp.clip(masked.mean(y, real), 1e-3, 1 - 1e-3)
        start = {"weights": jnp.zeros_like(x[0]), "intercept": jnp.log(rate) - jnp.log1p(-rate)}
        return linear.minimised(loss, start, _ITERATIONS)

    def predict(params, x):
        return low + (high - low) * jax.nn.sigmoid(_product(x, params["weights"]) + params["intercept"])

    return Probe(fit, predict)


def _mlp(*, alpha, low, high) -> Probe:
    """tanh(x A / sqrt(F) + a) b + c by 300 full-batch steps of Adam on the squared error + alpha / N (|A|^2 + |b|^2)."""
    def predict(params, x):
        hidden = jnp.tanh(_product(x, params["first"]) / jnp.sqrt(x.shape[1]) + params["shift"])
        return _product(hidden, params["second"]) + params["intercept"]

    def fit(x, y, real, group):
        optimizer, n = optax.adam(1e-2), jnp.maximum(masked.count(real, dtype=x.dtype), 1.0)
        key = jax.random.key(linear.SEED)
        params = {"first": jax.random.normal(key, (x.shape[1], _HIDDEN), x.dtype), "shift": jnp.zeros((1, _HIDDEN), x.dtype),
                  "second": jnp.zeros(_HIDDEN, x.dtype), "intercept": masked.mean(y, real)}

        def loss(params):
            error = masked.sum((predict(params, x) - y) ** 2, real)
            return (error + alpha * (jnp.sum(params["first"] ** 2) + jnp.sum(params["second"] ** 2))) / n

        def step(carry, _):
            params, state = carry
            change, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, change), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, length=300)[0][0]

    return Probe(fit, predict)


def _hl_gauss(*, alpha, low, high) -> Probe:
    borders = functools.partial(hl_gauss.widened, low, high, _BINS)  # not an array yet: nothing runs when a probe is made

    def logits(params, x):
        return _product(x, params["weights"]) + params["intercept"]

    def fit(x, y, real, group):
        weights, n = real.astype(x.dtype), jnp.maximum(masked.count(real, dtype=x.dtype), 1.0)
        targets = hl_gauss.histogram(y, borders().astype(x.dtype))

        def loss(params):
            size = jnp.sum(params["weights"] ** 2)
            return hl_gauss.cross_entropy(logits(params, x), targets, weights) + alpha / (2 * n) * size

        start = {"weights": jnp.zeros((x.shape[1], _BINS), x.dtype), "intercept": jnp.zeros((1, _BINS), x.dtype)}
        return linear.minimised(loss, start, _ITERATIONS)

    return Probe(fit, lambda params, x: hl_gauss.value(logits(params, x), borders().astype(x.dtype)))


def _mean(probes: Sequence[Probe]) -> Probe:
    return Probe(lambda *table: tuple(probe.fit(*table) for probe in probes),
                 lambda params, x: jnp.stack([probe.predict(p, x) for probe, p in zip(probes, params)]).mean(axis=0))


def _stack(probes: Sequence[Probe], alpha, low, high) -> Probe:
    """Each half of the prompts is predicted by probes fitted to the other half; a ridge on these outputs weighs the probes."""
    columns = (1,) * len(probes)
    stacker = _scaled(_ridge(alpha=alpha, low=low, high=high), columns, (None,) * len(probes), low, high)
    def outputs(params, x):
        return jnp.stack([q.predict(p, x) for q, p in zip(probes, params)], axis=1)

    def fit(features, labels, real, group):
        even = group % 2 == 0
        def fit_all(rows):
            return tuple(probe.fit(features, labels, rows, group) for probe in probes)
        fitted = jax.lax.map(fit_all, jnp.stack([real & ~even, real & even, real]))
        odd_half, even_half, whole = (jax.tree.map(lambda x: x[i], fitted) for i in range(3))
        table = jnp.where(even[:, None], outputs(odd_half, features), outputs(even_half, features))
        return whole, stacker.fit(table, labels, real, group)

    return Probe(fit, lambda params, x: stacker.predict(params[1], outputs(params[0], x)))

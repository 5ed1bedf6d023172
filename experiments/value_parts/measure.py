"""Predictions of success for policies unseen in training: V0 beside simpler predictors."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.experiments.value_parts import fleet
from jaxrl_llm.values import diagnostics, encoder, in_context, probe, v0
from jaxrl_llm.values.history import History


class Cases(NamedTuple):
    """S snapshots (a policy at a step) on U prompts: `known` f32[S, U], outcomes (NaN: not recorded); `context` bool[S, U],
    prompts shown; `asked` bool[S, U], prompts to be judged; `policy`, `step` i32[S]."""

    known: np.ndarray
    context: np.ndarray
    asked: np.ndarray
    policy: np.ndarray
    step: np.ndarray


def cases(data: History, policies: np.ndarray, askable: np.ndarray, size: int, rng: np.random.Generator) -> Cases:
    """Every snapshot of `policies` bool[M]: `size` random prompts outside `askable` bool[U] are shown, those inside are asked.

    Prompts that are shown differ between snapshots. Snapshots with fewer prompts show all they have.
    """
    snapshot, U = data.snapshot, len(data.prompts)
    kept = [s for s in range(snapshot.max() + 1) if policies[data.policy[snapshot == s][0]]]
    known, context = np.full((len(kept), U), np.nan), np.zeros((len(kept), U), bool)
    for i, s in enumerate(kept):
        rows = snapshot == s
        known[i, data.prompt[rows]] = data.outcome[rows]
        pool = np.flatnonzero(~np.isnan(known[i]) & ~askable)
        context[i, rng.permutation(pool)[:size]] = True
    first = [np.flatnonzero(snapshot == s)[0] for s in kept]
    return Cases(known, context, ~np.isnan(known) & askable[None], data.policy[first], data.step[first])


def compact(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the True entries of each row, `i32[S, n]` padded with 0, and which are real, `bool[S, n]`."""
    n = max(int(mask.sum(1).max()), 1)
    index = np.argsort(~mask, axis=1, kind="stable")[:, :n]
    return index, np.take_along_axis(mask, index, axis=1)


def in_context_predictions(cases: Cases, features: np.ndarray, predict) -> np.ndarray:
    """f32[S, U] of a function `(context [N, F], outcomes [N], mask [N], queries [Q, F]) -> [Q]`; NaN where not asked."""
    rows, real = compact(cases.context)
    asked, live = compact(cases.asked)
    outcomes = np.where(real, np.nan_to_num(np.take_along_axis(cases.known, rows, 1)), 0).astype(np.float32)
    features = jnp.asarray(features)
    one = jax.jit(lambda features, r, y, m, q: predict(features[r], y, m, features[q]))
    result = np.full(cases.known.shape, np.nan)
    for s in range(len(rows)):
        p = np.asarray(one(features, rows[s], outcomes[s], real[s], asked[s]))
        result[s, asked[s][live[s]]] = p[live[s]]
    return result


def strangers(cases: Cases, everyone: Cases, rng: np.random.Generator) -> Cases:
    """The same questions with the context of another policy: this measures what the prompt alone predicts."""
    order = np.array([rng.choice(np.flatnonzero(everyone.policy != m)) for m in cases.policy])
    return cases._replace(known=np.where(cases.asked, cases.known, everyone.known[order]), context=everyone.context[order])


def earlier_visits(cases: Cases, decay: float = 0.5) -> np.ndarray:
    """f[S, U]: moving average of the same policy's outcomes on the prompt at earlier steps; without any, the context mean."""
    mean = np.nanmean(np.where(cases.context, cases.known, np.nan), axis=1)
    result = np.full(cases.known.shape, np.nan)
    for s, (m, t) in enumerate(zip(cases.policy, cases.step)):
        before = np.flatnonzero((cases.policy == m) & (cases.step < t))
        total, weight = np.zeros(cases.known.shape[1]), np.zeros(cases.known.shape[1])
        for row in before[np.argsort(cases.step[before])]:
            seen = ~np.isnan(cases.known[row])
            total = np.where(seen, decay * total + np.nan_to_num(cases.known[row]), total)
            weight = np.where(seen, decay * weight + 1, weight)
        result[s] = np.where(weight > 0, total / np.maximum(weight, 1e-9), mean[s])
    return np.where(cases.asked, result, np.nan)


def conventional(data: History, policies: np.ndarray, prompts: np.ndarray, features: np.ndarray, cases: Cases) -> np.ndarray:
    """f[S, U]: a value model that does not know the policy, ridge regression on all outcomes of the training policies."""
    rows = policies[data.policy] & prompts[data.prompt]
    fitted = probe.make("ridge", sizes=(features.shape[1],), alpha=1.0)
    x, y = jnp.asarray(features[data.prompt[rows]]), jnp.asarray(data.outcome[rows])
    params = fitted.fit(x, y, jnp.ones(len(y), bool), jnp.asarray(data.prompt[rows]))
    value = np.asarray(fitted.predict(params, jnp.asarray(features)))
    return np.where(cases.asked, value[None], np.nan)


def other_policies(data: History, policies: np.ndarray, cases: Cases) -> np.ndarray:
    """f[S, U]: the mean outcome of the training policies on the prompt; 0.5 for prompts they never saw."""
    rows = policies[data.policy]
    total = np.bincount(data.prompt[rows], data.outcome[rows], minlength=len(data.prompts))
    count = np.bincount(data.prompt[rows], minlength=len(data.prompts))
    return np.where(cases.asked, np.where(count > 0, total / np.maximum(count, 1), 0.5)[None], np.nan)


def features_of(path: str, data: History, training: np.ndarray, model: v0.V0, params) -> dict[str, np.ndarray]:
    """Features of the prompts, `[U, ...]`: `summary`, pooled states of the encoder at `path`, and `z`, V0's.

    A head without an adapter reads the leading principal components of the summary, computed on the prompts in `training`.
    """
    states, mask = map(jnp.asarray, fleet.load_encoder(path).encode(data.prompts))
    summary = np.asarray(encoder.summary(states, mask))
    if model.adapter is None:
        return {"summary": summary, "z": principal(summary, training, model.head.features)}
    return {"summary": summary, "z": np.asarray(model.encode(params, states, mask))}


def principal(features: np.ndarray, training: np.ndarray, size: int) -> np.ndarray:
    """[U, size] coordinates along the leading directions of the training prompts' features, zeros beyond their rank."""
    centred = features - features[training].mean(0)
    _, _, directions = np.linalg.svd(centred[training], full_matrices=False)
    coordinates = centred @ directions[:size].T
    return np.pad(coordinates, ((0, 0), (0, size - coordinates.shape[1]))).astype(np.float32)


def scores(predicted: np.ndarray, cases: Cases) -> dict[str, float]:
    """`gAUC`: pair accuracy within each snapshot, weighted by its questions, of those with two different outcomes; `AUC`
    over all questions; `Brier`: mean squared error to the outcome; `ECE`, ten bins."""
    auc = jax.jit(diagnostics.pair_accuracy)
    real, actual = cases.asked, np.nan_to_num(cases.known)
    predicted = np.nan_to_num(predicted)
    mixed = [s for s in range(len(real)) if len(set(actual[s, real[s]])) > 1]
    weight = real[mixed].sum(1)
    within = [float(auc(predicted[s], actual[s], real[s])) for s in mixed]
    everything = np.random.default_rng(0).permutation(np.flatnonzero(real))[:2000]  # all pairs of these
    p, y = predicted.ravel()[everything], actual.ravel()[everything]
    return {"gAUC": float(np.average(within, weights=weight)) if mixed else 0.5,
            "AUC": float(auc(p, y, np.ones(len(y), bool))),
            "Brier": float(np.mean((predicted[real] - actual[real]) ** 2)),
            "ECE": diagnostics.calibration_error(predicted[real], actual[real])}


def predictors(model: v0.V0, params, features: dict[str, np.ndarray]) -> dict:
    """Name -> (features of the prompts, in-context function): predictors without training on policies, and V0."""
    plain = {"context mean": in_context.context_mean, "nearest neighbours": in_context.nearest, "ridge": in_context.ridge,
             "logistic": in_context.logistic}
    head = functools.partial(model.logits, params)
    return {name: (features["summary"], function) for name, function in plain.items()} | {
        "V0": (features["z"], lambda *case: v0.success(head(*case)))}

"""Quality of predicted values against the rollouts' rewards: the diagnostics of POISE (arXiv 2605.07579), calibration."""
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.maths import masked

_ROUNDING = 16  # errors of one operation that equal values may differ by, relative to the largest of them


def quality(predicted: Array, actual: Array, real: Array) -> dict[str, Array]:
    """Scalars over the `real` entries of two arrays of one shape.

    `mae`, `rmse`, `bias` = mean(predicted - actual), `pearson` (0 where one of them is constant), `brier_skill` =
    1 - mean squared error / Var(actual), `pair_accuracy`: share of the pairs with different actual values that the
    predictions order alike, ties counting half (0.5 without such a pair).
    """
    predicted, actual, real = predicted.reshape(-1), actual.reshape(-1), real.reshape(-1)
    error = jnp.where(real, predicted - actual, 0.0)
    mse = masked.mean(error**2, real)
    spread, variance = masked.var(predicted, real, ddof=0), masked.var(actual, real, ddof=0)
    covariance = masked.mean((predicted - masked.mean(predicted, real)) * (actual - masked.mean(actual, real)), real)
    return {
        "mae": masked.mean(jnp.abs(error), real), "rmse": jnp.sqrt(mse), "bias": masked.mean(error, real),
        "pearson": _ratio(covariance, jnp.sqrt(spread * variance)),
        "brier_skill": jnp.where(variance > 0, 1 - _ratio(mse, variance), 0.0),
        "pair_accuracy": pair_accuracy(predicted, actual, real),
    }


def pair_accuracy(predicted: Array, actual: Array, real: Array) -> Array:
    """Share of the pairs of `[N]` with different actual values that are predicted in the same order; ties count half.

    Values that differ by the rounding of a mean are ties.
    """
    higher = (_order(actual, real) > 0) & real[:, None] & real[None, :]
    agreed = (1 + _order(predicted, real)) / 2
    pairs = jnp.sum(higher, dtype=jnp.float32)
    return jnp.where(pairs > 0, masked.sum(agreed, higher) / jnp.maximum(pairs, 1.0), 0.5)


def _order(x: Array, real: Array) -> Array:
    """[N, N], 1 where x_i is above x_j, -1 where it is below, 0 where they are equal up to rounding or not numbers."""
    gap = x[:, None] - x[None, :]
    noise = _ROUNDING * jnp.finfo(x.dtype).eps * masked.max(jnp.abs(x), real, initial=0.0)
    return jnp.where(jnp.abs(gap) > noise, jnp.sign(gap), 0.0)


def variance_reduction(advantages: Array, rewards: Array, real: Array) -> Array:
    """`1 - Var(A) / Var(r)` over the real rollouts `[P, G]`; 0 where all rewards are equal."""
    variance = masked.var(rewards, real, ddof=0)
    return jnp.where(variance > 0, 1 - _ratio(masked.var(advantages, real, ddof=0), variance), 0.0)


def _ratio(x, y):
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)


def reliability(predicted: np.ndarray, actual: np.ndarray, bins: int = 10) -> list[dict[str, float]]:
    """Bins of equally many predictions `[N]`: mean `predicted`, mean `actual`, its standard `error` and the `count` in each.

    Entries with the same prediction stay in one bin, so there can be fewer.
    """
    predicted, actual = np.asarray(predicted, float), np.asarray(actual, float)
    if not len(predicted):
        return []
    place = np.unique(np.quantile(predicted, np.linspace(0, 1, bins + 1)[1:-1]))
    index = np.searchsorted(place, predicted, side="left")
    rows = []
    for number in np.unique(index):
        inside = index == number
        count = int(inside.sum())
        error = float(actual[inside].std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
        rows.append({"predicted": float(predicted[inside].mean()), "actual": float(actual[inside].mean()), "error": error,
                     "count": count})
    return rows


def calibration_error(predicted: np.ndarray, actual: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: mean over entries of |mean predicted - mean actual| of their bin of `reliability`."""
    rows = reliability(predicted, actual, bins)
    return sum(row["count"] * abs(row["predicted"] - row["actual"]) for row in rows) / max(sum(r["count"] for r in rows), 1)

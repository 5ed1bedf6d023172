"""Values by classification: a scalar as a smoothed histogram, learned with cross-entropy (HL-Gauss, arXiv 2403.03950)."""
import jax
import jax.numpy as jnp
from jax import Array


def edges(low: float, high: float, bins: int) -> Array:
    """`f32[bins + 1]` borders of equal bins on `[low, high]`; ValueError for fewer than 2 bins or an empty range."""
    if bins < 2 or not low < high:
        raise ValueError(f"bins={bins} on [{low}, {high}]: give at least 2 bins and low < high")
    return jnp.linspace(low, high, bins + 1)


def widened(low: float, high: float, bins: int) -> Array:
    """As `edges`, with two bins added beyond each end, so that targets at the ends keep their mean."""
    if bins < 6:
        raise ValueError(f"bins={bins}: four of them lie beyond the range, give at least 6")
    margin = 2 * (high - low) / (bins - 4)
    return edges(low - margin, high + margin, bins)


def centres(borders: Array) -> Array:
    """Middle of each bin, `[m]` from `[m + 1]`."""
    return (borders[:-1] + borders[1:]) / 2


def histogram(targets: Array, borders: Array, *, ratio: float = 0.75) -> Array:
    """`q_i`: mass in bin i of a Gaussian around the target with `sigma = ratio * bin width`, `[N, m]` from `[N]`.

    `q_i = (Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma)) / (same over the whole support)`, y clipped to it.
    """
    sigma = ratio * (borders[1] - borders[0])
    targets = jnp.clip(targets, borders[0], borders[-1])
    mass = jax.scipy.special.erf((borders[None, :] - targets[:, None]) / (jnp.sqrt(2.0) * sigma))
    return (mass[:, 1:] - mass[:, :-1]) / (mass[:, -1:] - mass[:, :1])


def cross_entropy(logits: Array, histograms: Array, weights: Array) -> Array:
    """`sum_n w_n (-sum_i q_ni log softmax(logits_n)_i) / sum_n w_n`; `histograms` carry no gradient."""
    each = -jnp.sum(jax.lax.stop_gradient(histograms) * jax.nn.log_softmax(logits, axis=-1), axis=-1)
    return jnp.sum(weights * each) / jnp.maximum(jnp.sum(weights), 1e-12)


def value(logits: Array, borders: Array) -> Array:
    """`sum_i softmax(logits)_i c_i`, `[...]` from `[..., m]`."""
    return jnp.einsum("...m,m->...", jax.nn.softmax(logits, axis=-1), centres(borders))

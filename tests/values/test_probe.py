"""Probes: the paper's numbers by hand, primal = dual = float64 numpy, padding rows, faults in the options."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.values import diagnostics, linear, probe

BLOCKS = (20, 20, 3)
ROWS = np.array([(0, 1, .5, .5, 0), (1, 1, .2, .2, 0), (2, 0, .4, .4, 0), (3, 0, .1, .1, 0)], np.float32)


def table(rows=160, real=120, seed=0):
    """Rows whose label is 1 with a probability that depends on the first 12 columns; constant and repeated columns too."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, sum(BLOCKS))) * rng.gamma(2.0, size=sum(BLOCKS)) + rng.normal(size=sum(BLOCKS))
    x[:, 30], x[:, 31] = 0.7, x[:, 29]
    logits = 1.5 * (x[:, :12] - x[:, :12].mean(0)) @ (rng.normal(size=12) / x[:, :12].std(0)) / 2
    chance = 1 / (1 + np.exp(-logits))
    y = (rng.random(rows) < chance).astype(float)
    return [np.asarray(a, np.float32) for a in (x, y)] + [np.arange(rows) < real, np.arange(rows) // 2, chance]


def by_hand(x, y, alpha):
    """Standardised, centred and solved, in float64 numpy."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    std = x.std(0)
    z = (x - x.mean(0)) / np.where(std > 1e-12, std, 1)
    w = np.linalg.solve(z.T @ z + alpha * np.eye(x.shape[1]), z.T @ (y - y.mean()))
    return w, lambda new: np.clip((new - x.mean(0)) / np.where(std > 1e-12, std, 1) @ w + y.mean(), 0, 1)


def test_the_papers_ridge_on_four_rows():
    ridge = probe.make("ridge", sizes=(1, 1, 3), alpha=1.0)
    labels = jnp.array([0.0, 1.0, 0.0, 1.0])
    scaler, params = fitted = ridge.fit(ROWS, labels, jnp.ones(4, bool), jnp.arange(4))
    np.testing.assert_allclose(scaler.mean[0], [1.5, .5, .3, .3, 0], atol=1e-6)
    np.testing.assert_allclose(scaler.std[0], [1.118034, .5, .158114, .158114, 0], atol=1e-6)
    np.testing.assert_allclose(params["weights"], [.013760, .123077, -.223792, -.223792, 0], atol=6e-7)
    assert params["intercept"] == 0.5
    np.testing.assert_allclose(ridge.predict(fitted, ROWS), [.038462, .9, .1, .961538], atol=6e-7)
    new = np.array([(1, 0, .3, .3, 0), (1, 1, .15, .15, 0)], np.float32)
    np.testing.assert_allclose(ridge.predict(fitted, new), [.370769, 1.0], atol=6e-7)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 30.0])
@pytest.mark.parametrize("rows", [24, 120])
def test_primal_dual_and_float64_agree(alpha, rows):
    x, y, *_ = table(rows, rows)
    z, centred = (x - x.mean(0)) / np.where(x.std(0) > 1e-6, x.std(0), 1), y - y.mean()
    exact = np.linalg.solve(z.T.astype(float) @ z + alpha * np.eye(z.shape[1]), z.T.astype(float) @ centred)
    padded = [np.concatenate([a, np.zeros((7, *a.shape[1:]), np.float32)]) for a in (z, centred)]
    for dual in (False, True, None):
        for rows_of in ((z, centred), padded):
            np.testing.assert_allclose(linear.ridge_weights(*rows_of, alpha, dual=dual), exact, rtol=2e-3, atol=2e-5)


def test_a_singular_table_with_almost_no_penalty_stays_finite():
    """Repeated columns, float32: alpha below its resolution acts like the smallest one that differs from 0."""
    x = np.repeat(np.random.default_rng(0).normal(size=(50, 10)), 9, axis=1).astype(np.float32)
    y = x[:, 0] - 2 * x[:, 9]
    for dual in (False, True):
        w = np.asarray(linear.ridge_weights(x, y, 1e-12, dual=dual), np.float64)
        np.testing.assert_allclose(x @ w, y, atol=2e-3)


def test_ridge_as_by_hand_and_padding_rows_do_not_count():
    x, y, real, group, chance = table()
    fit = jax.jit(probe.make("ridge", sizes=BLOCKS, alpha=3.0).fit)
    ridge = probe.make("ridge", sizes=BLOCKS, alpha=3.0)
    result = ridge.predict(fit(x, y, real, group), x)
    np.testing.assert_allclose(result, by_hand(x[:120], y[:120], 3.0)[1](x), atol=2e-4)
    spoilt = np.where(real[:, None], x, np.nan), np.where(real, y, np.nan)
    np.testing.assert_array_equal(ridge.predict(fit(*spoilt, real, group), x), result)
    order = np.random.default_rng(1).permutation(160)
    np.testing.assert_allclose(ridge.predict(fit(x[order], y[order], real[order], group[order]), x), result, atol=1e-4)


def test_principal_components_are_numpys():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 30)) @ np.diag(1.3 ** -np.arange(30)) @ np.linalg.qr(rng.normal(size=(30, 30)))[0]
    x -= x.mean(0)
    axes = np.asarray(linear.principal_components(np.asarray(x, np.float32), 5))
    wanted = np.linalg.svd(x, full_matrices=False)[2][:5].T
    np.testing.assert_allclose(np.abs(np.sum(axes * wanted, axis=0)), 1, atol=1e-3)  # up to their signs
    with pytest.raises(ValueError, match="31 principal components of 30 columns"):
        linear.principal_components(jnp.zeros((90, 30)), 31)


def test_axes_beyond_the_rank_of_the_rows_are_left_out():
    """Standardised, their rounding noise would be thousands of deviations in a row that was not fitted to."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(6, 30)), 10, axis=0).astype(np.float32)
    axes = np.asarray(linear.principal_components(x - x.mean(0), 8))
    np.testing.assert_allclose(np.linalg.norm(axes, axis=0), [1] * 5 + [0] * 3, atol=1e-4)
    scaler = linear.fit_scaler(jnp.asarray(x), jnp.ones(60, bool), (30,), (8,))
    assert np.abs(linear.scaled(scaler, rng.normal(size=(50, 30)).astype(np.float32), (30,))).max() < 10


@pytest.mark.slow
def test_ridge_on_principal_components_is_ridge_on_numpys():
    x, y, real, group, _ = table()
    x64, n = x[:120].astype(float), 120
    parts = []
    for block, k in ((slice(0, 20), 8), (slice(20, 40), 19)):
        centred = x64[:, block] - x64[:, block].mean(0)
        parts.append(centred @ np.linalg.svd(centred, full_matrices=False)[2][:k].T)
    _, wanted = by_hand(np.concatenate([*parts, x64[:, 40:]], axis=1), y[:n], 10.0)
    wanted = wanted(np.concatenate([*parts, x64[:, 40:]], axis=1))
    reduced = probe.make("ridge", sizes=BLOCKS, alpha=10.0, components=(8, 19))
    result = reduced.predict(reduced.fit(x, y, real, group), x)[:n]
    assert np.abs(result - wanted).max() < 0.02 and np.corrcoef(result, wanted)[0, 1] > 0.9995


def test_logistic_regression_is_at_the_minimum():
    x, y, real, group, _ = table()
    y = np.where(y > 0, 0.8, 0.1).astype(np.float32)  # soft labels
    made = probe.make("sigmoid_bce", sizes=BLOCKS, alpha=5.0)
    scaler, params = jax.jit(made.fit)(x, y, real, group)
    z = np.asarray(linear.scaled(scaler, x, BLOCKS), np.float64)[:120]
    w, b = np.asarray(params["weights"], np.float64), float(params["intercept"])
    error = 1 / (1 + np.exp(-(z @ w + b))) - y[:120]
    np.testing.assert_allclose(z.T @ error / 120 + 5.0 / 120 * w, 0, atol=2e-4)  # of mean BCE + alpha / (2 N) |w|^2
    assert abs(error.mean()) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    ("ridge", {}), ("mlp", {"alpha": 0.3}), (("ridge", "sigmoid_bce"), {}), (("ridge", "hl_gauss"), {"ensemble": "stack"}),
], ids=lambda x: "-".join(x) if isinstance(x, tuple) else None)
def test_every_probe_learns_and_is_deterministic(name, options):
    x, y, real, group, chance = table(400, 300)
    made = probe.make(name, sizes=BLOCKS, **{"alpha": 30.0, **options})
    fit = jax.jit(made.fit)
    fitted = fit(x, y, real, group)
    result = np.asarray(made.predict(fitted, x))
    assert 0 <= result.min() and result.max() <= 1
    assert np.corrcoef(result[300:], chance[300:])[0, 1] > 0.8  # on rows it was not fitted to
    assert diagnostics.calibration_error(result[300:], chance[300:], bins=5) < 0.12
    np.testing.assert_array_equal(made.predict(fit(x, y, real, group), x), result)
    blank = made.blank(400, 43)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), blank) == jax.tree.map(lambda a: (a.shape, a.dtype), fitted)
    assert np.isfinite(made.predict(blank, x)).all()


@pytest.mark.slow
def test_labels_of_another_range():
    x, y, real, group, chance = table(400, 300)
    for name in ("ridge", ("sigmoid_bce", "hl_gauss")):
        made = probe.make(name, sizes=BLOCKS, alpha=30.0, low=-1.0, high=3.0)
        result = np.asarray(made.predict(jax.jit(made.fit)(x, 4 * y - 1, real, group), x))[300:]
        assert -1 <= result.min() < 0 < 2 < result.max() <= 3
        assert np.corrcoef(result, chance[300:])[0, 1] > 0.8


def test_stacking_gives_a_useless_probe_no_weight():
    """On outputs for the rows it was fitted to, the probe that memorises would look best."""
    rng = np.random.default_rng(0)
    x, y, real, group, _ = table(300, 300)
    x = np.concatenate([x[:, :12], rng.normal(size=(300, 400))], axis=1).astype(np.float32)
    honest, memory = probe.make("ridge", sizes=(412,), alpha=300.0), probe.make("ridge", sizes=(412,), alpha=1e-3)
    _, stacked = jax.jit(probe._stack((honest, memory), 1.0, 0.0, 1.0).fit)(x, y, real, group)
    weights = np.asarray(stacked[1]["weights"])
    assert weights[0] > 2 * abs(weights[1]), weights


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="Did you mean 'ridge'"):
        probe.make("rigde", sizes=BLOCKS)
    with pytest.raises(ValueError, match="Did you mean 'stack'"):
        probe.make(("ridge", "mlp"), sizes=BLOCKS, ensemble="stac")
    for wrong in (dict(alpha=0.0), dict(low=1.0), dict(name=())):
        with pytest.raises(ValueError, match="alpha > 0"):
            probe.make(**{"name": "ridge", "sizes": BLOCKS, **wrong})
    with pytest.raises(ValueError, match="at most one number per block"):
        probe.make("ridge", sizes=(2,), components=(1, 1))

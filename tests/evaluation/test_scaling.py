"""The sigmoid against scipy and its own curve, curves that must not be fitted, the entropy law and its dynamics."""
import numpy as np
import pytest
from scipy.optimize import curve_fit

from jaxrl_llm.evaluation import scaling

TRUE = scaling.Sigmoid(0.3, 0.61, 1.9, 2600)
COMPUTE = np.linspace(300, 16000, 24)
GRIDS = {"ceilings": np.arange(0.55, 0.6551, 0.005), "middles": np.linspace(100, 8000, 40)}


def noisy(seed=0, sd=0.002):
    return TRUE.predict(COMPUTE) + np.random.default_rng(seed).normal(0, sd, 24)


def test_the_curve_of_a_worked_example():
    result = TRUE.predict(np.array([1300, 2600, 5200, 10400, 100000]))
    np.testing.assert_allclose(result, [0.365510, 0.455, 0.544490, 0.589235, 0.609698], atol=5e-7)
    assert TRUE.predict(0.0) == 0.3


def test_a_fit_is_the_best_of_its_grid():
    result = scaling.fit_sigmoid(COMPUTE, noisy(), 0.3, **GRIDS)
    assert result.ceiling == pytest.approx(0.61, abs=1e-12) and result.middle == pytest.approx(2530.769, abs=1e-3)
    def law(c, rate):
        return 0.3 + (result.ceiling - 0.3) / (1 + (result.middle / c) ** rate)
    (rate,), _ = curve_fit(law, COMPUTE, noisy(), p0=[1.0])
    assert result.rate == pytest.approx(rate, abs=1e-5)
    assert result.sse == pytest.approx(((law(COMPUTE, rate) - noisy()) ** 2).sum(), rel=1e-8)
    free = curve_fit(lambda c, a, b, m: 0.3 + (a - 0.3) / (1 + (m / c) ** b), COMPUTE, noisy(), p0=[0.6, 1.5, 3000])[0]
    assert result.ceiling == pytest.approx(free[0], abs=0.01) and result.rate == pytest.approx(free[1], rel=0.05)


def test_the_default_grids_find_the_curve_they_were_given():
    result = scaling.fit_sigmoid(COMPUTE, TRUE.predict(COMPUTE), 0.3)
    assert result.ceiling == pytest.approx(0.61, abs=0.006) and result.rate == pytest.approx(1.9, rel=0.06)
    assert abs(result.predict(100_000) - TRUE.predict(100_000)) < 0.006


def test_curves_that_fall_are_flagged():
    falling = np.concatenate([np.linspace(0.3, 0.6, 12), np.linspace(0.6, 0.3, 12)])
    for reward in (falling, noisy()[::-1]):
        with pytest.raises(ValueError, match="does not rise"):
            scaling.fit_sigmoid(COMPUTE, reward, 0.3)
    assert scaling.rises(COMPUTE, noisy(sd=0.02))
    with pytest.raises(ValueError, match="at least four evaluations"):
        scaling.fit_sigmoid(COMPUTE[:3], noisy()[:3], 0.3)


@pytest.mark.slow
def test_intervals_over_seeds_and_over_residuals():
    random = np.random.default_rng(1)
    recipes = [scaling.Sigmoid(0.3, 0.61 + random.normal(0, 0.01), 1.9, 2600).predict(COMPUTE) for _ in range(4)]
    curves = [(COMPUTE, r + random.normal(0, 0.002, 24)) for r in recipes]
    over_seeds = scaling.sigmoid_intervals(curves, 0.3, resamples=40, **GRIDS)
    one = scaling.sigmoid_intervals(curves[:1], 0.3, resamples=40, **GRIDS)
    def width(result):
        return result["ceiling"][1] - result["ceiling"][0]
    assert over_seeds["ceiling"][0] <= 0.61 <= over_seeds["ceiling"][1] and width(over_seeds) > 0.005
    assert one["rate"][0] < one["rate"][1] and one["middle"][0] <= one["middle"][1]


def test_the_second_half_is_predicted_best_by_the_law_that_made_it():
    result = scaling.extrapolation(COMPUTE, TRUE.predict(COMPUTE), 0.3)
    assert result["sigmoid"] < 0.003 and result["logarithm"] > 0.02
    logarithm = scaling.fit_logarithm(COMPUTE, 0.1 + 0.05 * np.log(COMPUTE))
    np.testing.assert_allclose(logarithm(1e6), 0.1 + 0.05 * np.log(1e6), rtol=1e-10)
    power = scaling.fit_power(COMPUTE, 0.7 - 3 * COMPUTE**-0.5, rates=np.array([0.3, 0.5, 0.9]))
    np.testing.assert_allclose(power(1e6), 0.7 - 3e-3, rtol=1e-8)


def test_the_entropy_law_of_a_worked_example():
    result = scaling.fit_entropy_law([1, 0.5, 0.2], [0.10, 0.30, 0.38])
    np.testing.assert_allclose([result.a, result.b, result.ceiling], [0.187043694, 0.608425358, 0.421381664], atol=5e-10)
    assert result.rmse == pytest.approx(3.09e-5, rel=1e-3)
    with pytest.raises(ValueError, match="different entropy"):
        scaling.fit_entropy_law([1, 1, 1], [0, 1, 2])


def test_early_entropy_predicts_late_reward():
    t = np.arange(40)
    entropy = 1.2 * np.exp(-t / 8) + 0.05
    reward = 0.62 - 0.12 * np.exp(entropy) + np.random.default_rng(0).normal(0, 0.003, 40)
    result = scaling.fit_entropy_law(entropy[:8], reward[:8])
    np.testing.assert_allclose([result.a, result.b, result.ceiling], [0.12137, 0.62437, 0.50300], atol=5e-6)
    assert result.rmse == pytest.approx(0.00147, abs=5e-6)
    assert np.sqrt(np.mean((result.predict(entropy[8:]) - reward[8:]) ** 2)) == pytest.approx(0.00398, abs=5e-6)


def test_standard_errors_of_the_entropy_law_in_simulation():
    random, entropy = np.random.default_rng(2), np.linspace(0.1, 1.2, 30)
    fits = [scaling.fit_entropy_law(entropy, 0.6 - 0.1 * np.exp(entropy) + random.normal(0, 0.01, 30)) for _ in range(400)]
    for name in ("a", "b", "ceiling"):
        spread = np.std([getattr(fit, name) for fit in fits])
        assert np.mean([getattr(fit, f"{name}_error") for fit in fits]) == pytest.approx(spread, rel=0.12)

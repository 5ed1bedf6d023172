"""The tuning protocol in worked numbers, and how much a choice matters."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import hyperparameters as tuning

TUNE = np.array([[.5, .7], [.9, .2], [.6, .65]])
TEST = np.array([[.55, .6], [.4, .5], [.62, .6]])


def test_a_worked_example():
    result = tuning.protocol(TUNE, TEST)
    assert result.incumbent == 2 and result.tuned == pytest.approx(.625) and result.tested == pytest.approx(.61)
    assert result.gap == pytest.approx(.015) and result.regret == 0
    np.testing.assert_allclose(result.single_seed_regret, [.16, .035], atol=1e-12)
    assert result.rank_correlation == pytest.approx(1)
    assert result.interval.low == pytest.approx(.6) and result.interval.high == pytest.approx(.62)


def test_sensitivity_from_the_tuning_seeds_alone():
    result = tuning.sensitivity(TUNE)
    assert result.spread == pytest.approx(.075) and result.median == pytest.approx(.6)
    assert result.seeds == pytest.approx(np.sqrt((.02 + .245 + .00125) / 3))
    # Seed 0 keeps row 1, worth .2 on seed 1 where .7 is possible; seed 1 keeps row 0, worth .5 where .9 is.
    assert result.single_seed_regret == pytest.approx((.5 + .4) / 2)
    one = tuning.sensitivity(TUNE[:, :1])
    assert np.isnan(one.seeds) and np.isnan(one.single_seed_regret) and one.spread == pytest.approx(.4)


def test_failed_runs():
    broken = TUNE.copy()
    broken[2, 1] = np.nan
    assert tuning.protocol(broken, TEST).incumbent == 0
    assert tuning.sensitivity(broken).spread == pytest.approx(.05)
    with pytest.raises(ValueError, match="without a result"):
        tuning.sensitivity(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match=r"\[3, 2\] and \[2, 2\]"):
        tuning.protocol(TUNE, TEST[:2])


def test_means_by_value():
    settings = [{"lr": 1, "g": 4}, {"lr": 1, "g": 8}, {"lr": 2, "g": 4}]
    result = tuning.by_value(settings, TUNE)
    assert result["lr"] == pytest.approx({"1": (.5 + .7 + .9 + .2) / 4, "2": .625}) and result["g"]["8"] == pytest.approx(.55)
    failed = np.where(np.arange(3)[:, None] == 2, np.nan, TUNE)
    assert np.isnan(tuning.by_value(settings, failed)["lr"]["2"])

"""Noisy steps settle where the formulas predict, batches grow by minibatches, and verdicts detect planted effects."""
import json

import numpy as np
import pytest

from jaxrl_llm.audits import outer_step


@pytest.mark.parametrize("samples, excess", [(16, 0.041667), (64, 0.010417), (256, 0.002604)])
def test_a_worked_example(samples, excess):
    assert round(outer_step.excess_loss(0.5, 4.0, samples, 1.0), 6) == excess


def test_a_simulation_settles_at_the_predicted_point():
    rng, step, noise, samples, curvature = np.random.default_rng(0), 0.3, 2.0, 8, 1.5
    x, seen = np.zeros(20_000), []
    for number in range(60):
        x = x - step * (curvature * x + rng.normal(size=x.shape) * np.sqrt(noise / samples))
        seen.append(0.5 * curvature * np.mean(x**2))
    assert abs(seen[-1] / outer_step.excess_loss(step, noise, samples, curvature) - 1) < 0.05
    variance = outer_step.stationary_variance(step, noise, samples, curvature)
    assert outer_step.excess_loss(step, noise, samples, curvature) == pytest.approx(curvature * variance / 2, rel=1e-12)
    assert outer_step.excess_loss(step, noise, 2 * samples, curvature) == pytest.approx(seen[-1] / 2, rel=0.05)
    for wrong in ((2.0, 1.0, 8, 1.0), (0.0, 1.0, 8, 1.0), (0.5, 1.0, 0, 1.0)):
        with pytest.raises(ValueError, match="allowed are products between 0 and 2"):
            outer_step.excess_loss(*wrong)


def test_more_rollouts_are_more_minibatches():
    before = outer_step.Batch(1024 * 128, minibatches=8, epochs=4, learning_rate=3e-4)
    after = outer_step.co_scaled(before, 8192 * 128)
    assert after == outer_step.Batch(1_048_576, 64, 4, 3e-4) and (after.minibatch, after.updates) == (16_384, 256)
    with pytest.raises(ValueError, match="no multiple of a minibatch of 16384"):
        outer_step.co_scaled(before, 20_000)


def test_data_per_divergence():
    assert outer_step.data_per_divergence(4096, 0.02) == pytest.approx(204_800)
    assert outer_step.data_per_divergence(4096, 0.0) == np.inf


def noisy(level, seed, count=60, slope=0.0):
    return level + slope * np.arange(count) + 0.05 * np.random.default_rng(seed).normal(size=count)


def test_verdicts_detect_planted_effects():
    seeds = [seed for seed in range(200) if not outer_step.plateau(noisy(0.6, seed)).moves]
    assert len(seeds) > 190
    rises = [outer_step.verdict(noisy(0.6, seed), noisy(0.7, 1000 + seed)) for seed in seeds]
    stays = [outer_step.verdict(noisy(0.6, seed), noisy(0.6, 1000 + seed)) for seed in seeds]
    assert all(one.says.startswith("stagnation") for one in rises)
    assert np.mean([one.low <= 0.1 <= one.high for one in rises]) > 0.9, "95% intervals"
    assert np.mean([one.says.startswith("other") for one in stays]) > 0.93
    assert np.mean([one.low <= 0 <= one.high for one in stays]) > 0.9, "95% intervals"
    with pytest.raises(ValueError, match="still moves in these steps"):
        outer_step.verdict(noisy(0.2, 0, slope=0.01), noisy(0.6, 1))
    with pytest.raises(ValueError, match="15 steps with a reward; a plateau needs 20"):
        outer_step.plateau(noisy(0.6, 0, count=15))


def test_the_command(tmp_path, capsys):
    for name, level in (("first", 0.6), ("second", 0.8)):
        (tmp_path / name).mkdir()
        lines = [{"step": step, "reward/mean": value, "completion/tokens": 500, "approx_kl": 0.025}
                 for step, value in enumerate(noisy(level, 3))]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outer_step.main([str(tmp_path / "first"), str(tmp_path / "second"), "--last=40"]) == 0
    printed = capsys.readouterr().out
    assert "difference +0.2 (" in printed and "stagnation" in printed and "last 40 steps" in printed
    assert printed.count("2e+04") == 2, "tokens for each nat"
    with pytest.raises(SystemExit, match="has no metric 'loss'; it has approx_kl, completion/tokens, reward/mean, step"):
        outer_step.main([str(tmp_path / "first"), str(tmp_path / "second"), "--metric=loss"])

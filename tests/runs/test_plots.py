"""The figure draws what is there, smooths honestly and copes with short, partial and broken runs."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.runs.plots import _mark_phases, _panels, phase_starts, plot_curves, smooth
from jaxrl_llm.store.lines import read_metrics


def write_run(folder, steps, **constant):
    rng = np.random.default_rng(0)
    with MetricWriter(folder) as writer:
        for step in range(1, steps + 1):
            row = {
                "reward/mean": rng.random(),
                "completion/length": 100 + step,
                "entropy": 1 / step,
                "grad_norm": rng.random(),
                "mismatch/kl": 1e-4 * 10 ** (3 * rng.random()),
                "loss": rng.normal(),
                "groups/all_equal": rng.random(),
                "clip_fraction": 0.1,
                "ratio/low_fraction": 0.2,
                "time/rollout": 60.0 if step == 1 else 2.0,
                "time/update": 1.0,
                "time/step": 3.1,
                "time/other": 0.1,
            }
            if step % 10 == 0:
                row |= {
                    "eval/score": 0.5,
                    "eval/score_low": 0.4,
                    "eval/score_high": 0.6,
                    "time/evaluation_setup": 3.0,
                }
            writer.write(step, row | constant)
    return folder


def draw(folder):
    """The axes of each panel, by title."""

    figure, drawn = Figure(), {}
    for title, function in _panels(read_metrics(folder)):
        drawn[title] = figure.add_subplot(4, 4, len(drawn) + 1)
        function(drawn[title])
    return drawn


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.slow
def test_full_run(tmp_path):
    out = plot_curves(write_run(tmp_path, 50) / "metrics.jsonl", tmp_path / "figures" / "curves.png")
    assert png_size(out) == (round(4 * 4.3 * 130), round(2 * 3.4 * 130))
    axes = draw(tmp_path)
    assert list(axes) == [
        "Reward",
        "Completion length",
        "Policy entropy",
        "KL divergence",
        "Gradient norm",
        "Loss (near 0 on policy)",
        "Lost signal",
        "Time per step",
    ]
    assert axes["Reward"].get_legend_handles_labels()[1] == ["training reward", "held-out score with interval"]
    np.testing.assert_allclose(axes["Reward"].containers[0].lines[2][0].get_segments()[0][:, 1], [0.4, 0.6])
    assert axes["KL divergence"].get_yscale() == "log" and axes["Completion length"].get_yscale() == "linear"
    assert axes["Completion length"].get_ylabel() == "tokens"
    assert axes["Lost signal"].get_legend_handles_labels()[1] == [
        "groups without signal",
        "clipped tokens",
        "ratio/low_fraction",
    ]
    time = axes["Time per step"]
    assert time.get_legend_handles_labels()[1] == ["rollout", "update", "evaluation setup", "other"]
    assert time.get_title(loc="right") == "slowest: step 1, 61.1 s"
    # 98% of the steps take at most 6.1 s: 2 + 1 + 0.1, and 3 more with an evaluation.
    assert time.get_ylim() == pytest.approx((0, 1.35 * 6.1))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 19])
def test_short_run(tmp_path, steps):
    plot_curves(write_run(tmp_path, steps), tmp_path / "curves.png")


def test_broken_values_do_not_break_the_figure(tmp_path):
    write_run(tmp_path, 30, grad_norm=math.nan, loss=math.inf, **{"mismatch/kl": 0.0, "reward/mean": math.nan})
    axes = draw(tmp_path)
    assert "Gradient norm" not in axes and "Loss (near 0 on policy)" not in axes
    assert axes["KL divergence"].get_yscale() == "linear"
    assert axes["Reward"].get_ylabel() == "reward"
    plot_curves(tmp_path, tmp_path / "curves.png")


def test_only_what_is_there(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"entropy": 1.0, "custom": 2.0})
    assert png_size(plot_curves(tmp_path, tmp_path / "one.png")) == (round(4.3 * 130), round(3.4 * 130))
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"custom": 2.0})
    with pytest.raises(ValueError, match=r"nothing to draw; its metrics: \['custom', 'step'\]"):
        plot_curves(tmp_path, tmp_path / "none.png")
    with MetricWriter(tmp_path):
        pass
    with pytest.raises(ValueError, match="nothing to draw; its metrics: none"):
        plot_curves(tmp_path, tmp_path / "none.png")
    with pytest.raises(FileNotFoundError, match="no metrics file"):
        plot_curves(tmp_path / "missing", tmp_path / "none.png")


def test_smooth_is_a_gaussian_mean_over_finite_neighbours():
    np.testing.assert_allclose(smooth(np.full(30, 0.7), 3.0), 0.7)
    values = np.random.default_rng(0).normal(size=40)
    values[[5, 6]] = np.nan, np.inf
    result = smooth(values, 2.0)
    assert np.isnan(result[5]) and np.isnan(result[6])
    for i in (0, 7, 20, 39):
        near = [j for j in range(max(0, i - 6), min(40, i + 7)) if np.isfinite(values[j])]
        weights = [math.exp(-0.5 * ((i - j) / 2.0) ** 2) for j in near]
        assert result[i] == pytest.approx(sum(w * values[j] for w, j in zip(weights, near)) / sum(weights), abs=1e-12)
    np.testing.assert_array_equal(smooth(np.array([3.0]), 0.5), [3.0])


def test_a_divergence_that_is_rounding_is_drawn_as_none(tmp_path):
    axes = draw(write_run(tmp_path, 5, **{"mismatch/kl": 3e-8}))["KL divergence"]
    assert axes.get_yscale() == "linear" and axes.get_ylim() == (-1e-5, 1e-4)


def test_phases_are_marked_before_their_first_steps(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step, phase in enumerate([1, 1, 1, 2, 2, 3]):
            writer.write(step, {"entropy": 1.0, "phase": phase})
    metrics = read_metrics(tmp_path)
    assert phase_starts(metrics) == [(1, 0), (2, 3), (3, 5)] and phase_starts({"step": metrics["step"]}) == []
    axes = Figure().add_subplot()
    _mark_phases(axes, metrics, ["warm", "long", "last"])
    assert [line.get_xdata()[0] for line in axes.lines] == [-0.5, 2.5, 4.5]
    assert [text.get_text() for text in axes.texts] == ["warm", "long", "last"]

"""One figure that shows whether a value model can be trusted: calibration, and predicted against actual rewards."""
from pathlib import Path

import numpy as np

from jaxrl_llm.tools.figures import COLORS, figure_file
from jaxrl_llm.values import diagnostics


def plot_history(predicted, actual, group, real, out_png: str | Path) -> Path | None:
    """Draws an estimator's `history` to `out_png`; returns None, without a figure, while there is nothing to draw.

    predicted, actual `[N]`: predictions made before the reward was known, and the rewards; group i32[N]: prompts; real
    bool[N]: entries that count. Left: predictions in equally filled bins against the mean reward in each, with standard
    errors. Right: one dot per prompt, means over its rollouts.
    """
    predicted, actual, group = (np.asarray(x)[np.asarray(real)] for x in (predicted, actual, group))
    if not len(predicted):
        return None
    with figure_file(out_png, 9.6, 4.4) as figure:
        left, right = figure.subplots(1, 2)
        draw_reliability(left, predicted, actual)
        draw_scatter(right, predicted, actual, group)
    return Path(out_png)


def draw_reliability(axes, predicted: np.ndarray, actual: np.ndarray, color: str = COLORS[0], label: str | None = None) -> None:
    """Mean reward over mean prediction in ten bins, with standard errors and the diagonal of a calibrated model."""
    rows = diagnostics.reliability(predicted, actual)
    x, y, error = (np.array([row[name] for row in rows]) for name in ("predicted", "actual", "error"))
    _diagonal(axes, predicted, actual)
    axes.errorbar(x, y, yerr=error, color=color, marker="o", markersize=5, capsize=2.5, linewidth=1.4, label=label)
    axes.set_title(f"Reliability (calibration error {diagnostics.calibration_error(predicted, actual):.3f})")
    axes.set_xlabel("predicted reward")
    axes.set_ylabel("mean reward")


def draw_scatter(axes, predicted: np.ndarray, actual: np.ndarray, group: np.ndarray, color: str = COLORS[1]) -> None:
    """One dot per prompt; equal rewards are jittered a little, so that dots do not hide each other."""
    _, index = np.unique(group, return_inverse=True)
    count = np.bincount(index)
    x, y = np.bincount(index, predicted) / count, np.bincount(index, actual) / count
    levels = np.unique(y)
    spread = 0.3 * np.min(np.diff(levels)) if 1 < len(levels) < 30 else 0.0
    _diagonal(axes, predicted, actual)
    axes.scatter(x, y + spread * (np.random.default_rng(0).random(len(y)) - 0.5), s=8, alpha=0.35, color=color, linewidths=0)
    pearson = np.corrcoef(x, y)[0, 1] if x.std() > 0 and y.std() > 0 else 0.0
    axes.set_title(f"{len(x)} prompts (Pearson {pearson:.2f})")
    axes.set_xlabel("predicted reward of the prompt")
    axes.set_ylabel("mean reward of its rollouts")


def _diagonal(axes, predicted, actual) -> None:
    low, high = min(predicted.min(), actual.min()), max(predicted.max(), actual.max())
    axes.plot([low, high], [low, high], color="#8C8C8C", linestyle="--", linewidth=1.0)

"""One figure that shows whether a run is healthy: reward, length, entropy, divergences, gradients, failures, time."""
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools.figures import COLORS, figure_file

_PHASE_ORDER = ("rollout", "reward", "record", "update", "evaluation_setup", "checkpoint")
_KL_LABELS = {"kl": "policy vs reference", "kl/ref": "policy vs reference", "mismatch/kl": "sampler vs learner"}
_SHARE_LABELS = {
    "groups/all_equal": "groups without signal",
    "completion/truncated": "truncated completions",
    "clip_fraction": "clipped tokens",
}
Metrics = dict[str, np.ndarray]


def plot_curves(metrics_path: str | Path, out_png: str | Path, phases: Sequence[str] = ()) -> Path:
    """Draws the metrics of a run (file or folder) to `out_png`, without empty panels; a line where each of its `phases` begins.

    Faint lines are the values of each step, strong ones their centred Gaussian mean. Raises FileNotFoundError without
    metrics and ValueError if none of them can be drawn.
    """
    metrics = read_metrics(metrics_path)
    panels = _panels(metrics)
    if not panels:
        raise ValueError(
            f"{metrics_path} holds nothing to draw; its metrics: {sorted(metrics) if len(metrics['step']) else 'none'}")
    columns = min(4, len(panels)) if len(panels) != 6 else 3
    rows = math.ceil(len(panels) / columns)
    with figure_file(out_png, 4.3 * columns, 3.4 * rows) as figure:
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, hspace=0.04, wspace=0.03)
        for position, (title, draw) in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, columns, position)
            axes.set_title(title)
            draw(axes)
            axes.set_xlim(*_x_limits(metrics["step"]))
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
            axes.set_xlabel("step")
            _mark_phases(axes, metrics, phases)
            if not axes.get_legend() and len(axes.get_legend_handles_labels()[1]) > 1:
                axes.legend(loc="best", handlelength=1.4)
    return Path(out_png)


def draw_or_warn(draw: Callable, *arguments: Any) -> None:
    """Calls `draw(*arguments)`; errors become warnings, since a figure must not end a run or hide the error that does."""
    try:
        draw(*arguments)
    except Exception as error:
        warnings.warn(f"{arguments[-1]} was not drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Gaussian mean of f64[N] with standard deviation `width` (points) over finite neighbours; NaN stays NaN."""
    radius = max(1, math.ceil(3 * width))
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(width, 1e-9)) ** 2)
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="full")[radius:-radius]
    weight = np.convolve(finite.astype(float), kernel, mode="full")[radius:-radius]
    return np.where(finite, total / np.maximum(weight, 1e-300), np.nan)


def _panels(metrics: Metrics) -> list[tuple[str, Callable[[Any], None]]]:
    """(title, function that draws on axes) of each panel that has data."""
    present = {name for name, values in metrics.items() if name != "step" and np.isfinite(values).any()}
    words = {name: set(name.replace("_", "/").split("/")) for name in present}
    kl = {name: _KL_LABELS.get(name, name) for name in sorted(present) if "kl" in words[name]}
    shares = {name: label for name, label in _SHARE_LABELS.items() if name in present}
    shares |= {name: name for name in sorted(present - shares.keys()) if "fraction" in words[name]}
    # A metric time/step is the sum of the phases, not another phase.
    times = [n for n in sorted(present, key=_phase_rank) if n.startswith("time/") and n != "time/step"]

    def lines(labels: dict[str, str], ylabel: str, **style: Any) -> Callable[[Any], None]:
        return lambda axes: _draw_lines(axes, metrics, labels, ylabel, **style)

    candidates = [
        ({"reward/mean", "eval/score"} & present, "Reward", lambda axes: _draw_reward(axes, metrics, present)),
        ({"completion/length"} & present, "Completion length", lines({"completion/length": "mean"}, "tokens", color=2)),
        ({"entropy"} & present, "Policy entropy", lines({"entropy": "entropy"}, "nats per token", color=3)),
        (kl, "KL divergence", lines(kl, "nats per token", log=True, rounding=1e-5)),
        ({"grad_norm"} & present, "Gradient norm", lines({"grad_norm": "norm"}, "L2 norm", color=4, log=True)),
        ({"loss"} & present, "Loss (near 0 on policy)", lines({"loss": "loss"}, "loss", color=6)),
        (shares, "Lost signal", lambda axes: _draw_shares(axes, metrics, shares)),
        (times, "Time per step", lambda axes: _draw_times(axes, metrics, times)),
    ]
    return [(title, draw) for data, title, draw in candidates if data]


def phase_starts(metrics: Metrics) -> list[tuple[int, int]]:
    """Number of each phase of a run, and its first step; none for a run without phases."""
    numbers = metrics.get("phase", np.zeros(0))
    at = [0, *(np.flatnonzero(np.diff(numbers) > 0) + 1)] if len(numbers) else []
    return [(int(numbers[i]), int(metrics["step"][i])) for i in at if np.isfinite(numbers[i])]


def _mark_phases(axes: Any, metrics: Metrics, names: Sequence[str]) -> None:
    """Draws a line before the first step of each phase, with its name along it."""
    starts = phase_starts(metrics)
    for number, step in starts if len(starts) > 1 else ():
        name = names[number - 1] if number <= len(names) else str(number)
        axes.axvline(step - 0.5, color="#777777", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(name, (step - 0.5, 0.0), xycoords=("data", "axes fraction"), xytext=(2, 4), textcoords="offset points",
                      va="bottom", rotation=90, fontsize=8, color="#555555")


def _phase_rank(name: str) -> tuple[int, str]:
    phase = name.removeprefix("time/")
    last = len(_PHASE_ORDER) + (phase == "other")
    return (_PHASE_ORDER.index(phase) if phase in _PHASE_ORDER else last), phase


def _x_limits(steps: np.ndarray) -> tuple[float, float]:
    low, high = float(steps.min()), float(steps.max())
    margin = max(0.02 * (high - low), 0.5)
    return low - margin, high + margin


def _curve(axes: Any, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """Faint raw values under their smoothed curve; a few points are drawn without smoothing."""
    kept = np.isfinite(values)
    steps, values = steps[kept], values[kept]
    if len(values) < 20:
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
    axes.plot(steps, smooth(values, len(values) / 60), color=color, linewidth=2.0, label=label)


def _draw_lines(axes: Any, metrics: Metrics, labels: dict[str, str], ylabel: str, color: int = 0, log: bool = False,
                rounding: float = 0.0) -> None:
    """One curve per label; if all values are below `rounding`, where float32 cannot tell them from 0, the axis shows 0."""
    for index, (name, label) in enumerate(labels.items()):
        _curve(axes, metrics["step"], metrics[name], COLORS[(color + index) % len(COLORS)], label)
    values = np.concatenate([metrics[name] for name in labels])
    values = values[np.isfinite(values)]
    if rounding and np.abs(values).max(initial=0) < rounding:
        axes.set_ylim(-rounding, 10 * rounding)
    elif log and values.min() > 0 and values.max() / values.min() > 30:
        axes.set_yscale("log")
    axes.set_ylabel(ylabel)


def _draw_reward(axes: Any, metrics: Metrics, present: set[str]) -> None:
    if "reward/mean" in present:
        _curve(axes, metrics["step"], metrics["reward/mean"], COLORS[0], "training reward")
    if "eval/score" in present:
        at = np.isfinite(metrics["eval/score"])
        steps, score = metrics["step"][at], metrics["eval/score"][at]
        label = "held-out score"
        bars = None
        if {"eval/score_low", "eval/score_high"} <= present:
            low, high = metrics["eval/score_low"][at], metrics["eval/score_high"][at]
            bars = np.maximum(0.0, np.nan_to_num(np.stack([score - low, high - score])))
            label += " with interval"
        axes.errorbar(steps, score, yerr=bars, color=COLORS[1], linestyle="-", linewidth=1.2, marker="o", markersize=5,
                      markeredgecolor="white", capsize=2.5, elinewidth=1.4, label=label, zorder=5)
    axes.set_ylabel("reward, score" if {"reward/mean", "eval/score"} <= present else "reward")


def _draw_shares(axes: Any, metrics: Metrics, labels: dict[str, str]) -> None:
    from matplotlib.ticker import PercentFormatter

    _draw_lines(axes, metrics, labels, "share")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.set_ylim(bottom=0)


def _draw_times(axes: Any, metrics: Metrics, names: list[str]) -> None:
    """Stacked seconds per phase; the scale excludes rare slow steps (compilation) and names the slowest."""
    seconds = np.nan_to_num(np.stack([metrics[name] for name in names]))
    total = seconds.sum(axis=0)
    axes.stackplot(metrics["step"], seconds, labels=[name.removeprefix("time/").replace("_", " ") for name in names],
                   colors=COLORS, alpha=0.85, linewidth=0)
    top = 1.35 * np.quantile(total, 0.98, method="lower") if len(total) >= 20 else 1.15 * total.max()
    if top > 0:
        axes.set_ylim(0, top)
    if total.max() > top:
        axes.set_title(f"slowest: step {metrics['step'][total.argmax()]}, {total.max():.3g} s", loc="right", fontsize=9,
                       weight="normal", color="#555555")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="upper left", ncols=3, handlelength=1.0, columnspacing=1.2)
    axes.set_ylabel("seconds")

"""Metrics as small inline SVG pictures, one per metric with all runs, and the numbers behind them."""
import dataclasses
import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.runs.plots import smooth
from jaxrl_llm.store.begun import Begun
from jaxrl_llm.tools.figures import COLORS

# What is shown first: metric -> title. Every other metric follows under its own name.
TITLES = {
    "eval/score": "Held-out score",
    "eval/reward": "Held-out reward, with its costs",
    "eval/solved": "Held-out problems solved, share of completions",
    "reward/mean": "Training reward",
    "completion/length": "Completion length, tokens",
    "entropy": "Policy entropy, nats per token",
    "groups/all_equal": "Groups without signal, share",
    "completion/truncated": "Truncated completions, share",
    "grad_norm": "Gradient norm",
    "clip_fraction": "Clipped tokens, share",
    "kl": "KL to the reference, nats per token",
    "mismatch/kl": "KL of sampler and learner, nats per token",
    "value/explained_variance": "Explained variance of the values",
    "value/pearson": "Correlation of values and rewards",
}
HIDDEN = tuple(f"eval/{name}_{side}" for name in ("score", "solved") for side in ("low", "high")) + (
    "phase",)  # drawn as intervals, and as marks
_POINTS = 240  # of one line, at most: what a small picture can show
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 190, 46, 10, 10, 24


@dataclasses.dataclass(frozen=True)
class Line:
    """One run's values of one metric: `x`, `y` `[N]`, all finite; `low` and `high` `[N]` where there is an interval."""

    color: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class Mark(NamedTuple):
    """Where a phase of a run begins: between two steps, with its name."""

    x: float
    text: str
    color: str


def marks_of(all_begun: Sequence[Sequence[Begun]]) -> list[Mark]:
    """The beginnings of the phases of each run, grey and with their names if there is one run."""
    alone = len(all_begun) == 1
    return [Mark(one.start + 0.5, one.name * alone, "#8C8C8C" if alone else color_of(run))
            for run, begun in enumerate(all_begun) for one in begun]


def color_of(run: int) -> str:
    """The colour of the run with this number."""
    return COLORS[run % len(COLORS)]


def names_of(all_metrics: Sequence[dict[str, np.ndarray]]) -> tuple[list[str], list[str]]:
    """Metrics that any run has a finite value of: those with a title, then all others by name."""
    present = {name for metrics in all_metrics for name, values in metrics.items()
               if name != "step" and name not in HIDDEN and np.isfinite(values).any()}
    return [name for name in TITLES if name in present], sorted(present - TITLES.keys())


def lines_of(all_metrics: Sequence[dict[str, np.ndarray]], name: str) -> list[Line]:
    """One line per run that has the metric."""
    lines = []
    for run, metrics in enumerate(all_metrics):
        values = metrics.get(name, np.zeros(0))
        kept = np.flatnonzero(np.isfinite(values))
        if not len(kept):
            continue
        low, high = ((metrics[f"{name}_{side}"][kept] if f"{name}_{side}" in metrics else None) for side in ("low", "high"))
        lines.append(Line(color_of(run), metrics["step"][kept].astype(float), values[kept], low, high))
    return lines


def thin(x: np.ndarray, y: np.ndarray, points: int = _POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points, each the mean of equally many successive values."""
    if len(x) <= points:
        return x, y
    def means(values):
        return np.array([part.mean() for part in np.array_split(values, points)])
    return means(x), means(y)


def data_of(all_metrics: Sequence[dict[str, np.ndarray]], name: str) -> list[dict | None]:
    """The numbers shown under the pointer, one entry per run: {"x": steps, "y": values to four digits}."""
    entries: list[dict | None] = []
    for metrics in all_metrics:
        lines = lines_of([metrics], name)
        if not lines:
            entries.append(None)
            continue
        x, y = thin(lines[0].x, lines[0].y)
        entries.append({"x": [round(float(v), 1) for v in x], "y": [float(f"{v:.4g}") for v in y]})
    return entries


def svg(name: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """The picture: faint values with their Gaussian mean over them, or dots with intervals if there are few; phases' marks."""
    x_low, x_high = min(line.x.min() for line in lines), max(line.x.max() for line in lines)
    x_high = max(x_high, x_low + 1)
    shown = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    y_of, ticks = _scale(np.concatenate([part[np.isfinite(part)] for part in shown]))
    def x_of(x):
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" data-metric="{html.escape(name)}" '
             f'data-x0="{x_low:g}" data-x1="{x_high:g}" data-left="{_LEFT}" data-right="{_WIDTH - _RIGHT}">']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
                     f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in _nice(x_low, x_high, whole=True):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{_HEIGHT - 7}" text-anchor="middle">{number(tick)}</text>')
    for mark in marks:
        parts += _mark(mark, x_of(min(max(mark.x, x_low), x_high)))
    for line in lines:
        parts += _draw(line, x_of, y_of)
    cursor = f'<path class="cursor" d="M0 {_TOP}V{_HEIGHT - _BOTTOM}" visibility="hidden"/></svg>'
    return "".join(parts) + cursor


def number(value: float) -> str:
    """A tick's label: 0.02, 1500, 3e-08."""
    text = f"{value:.6g}"
    return f"{value:.2g}" if len(text) > 6 else text


def _mark(mark: Mark, x: float) -> list[str]:
    """The dashed line at the beginning of a phase, and the phase's name right of its top."""
    line = f'<path class="mark" stroke="{mark.color}" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
    return [line, f'<text class="mark" x="{x + 3:.1f}" y="{_TOP + 7}">{html.escape(mark.text)}</text>' * bool(mark.text)]


def _draw(line: Line, x_of, y_of) -> list[str]:
    def path(x, y):
        return "M" + "L".join(f"{x_of(a):.1f} {y_of(b):.1f}" for a, b in zip(x, y))
    if len(line.x) < 20:
        bars = ""
        if line.low is not None and line.high is not None:
            bars = "".join(f"M{x_of(x):.1f} {y_of(a):.1f}V{y_of(b):.1f}" for x, a, b in zip(line.x, line.low, line.high)
                           if math.isfinite(a + b))
        dots = "".join(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.6" fill="{line.color}"/>'
                       for x, y in zip(line.x, line.y))
        return [f'<path class="line" stroke="{line.color}" d="{path(line.x, line.y)}{bars}"/>', dots]
    smoothed = thin(line.x, smooth(line.y, len(line.y) / 60))
    return [f'<path class="raw" stroke="{line.color}" d="{path(*thin(line.x, line.y))}"/>',
            f'<path class="line" stroke="{line.color}" d="{path(*smoothed)}"/>']


def _scale(values: np.ndarray):
    """`(value -> vertical position, ticks)`, logarithmic where positive values span more than 1.5 powers of ten."""
    low, high = float(values.min()), float(values.max())
    logarithmic = low > 0 and high / low > 30
    forward = math.log10 if logarithmic else float
    bottom, top = forward(low), forward(high)
    margin = 0.06 * (top - bottom) or 0.06 * abs(top) or 1.0
    bottom, top = bottom - margin, top + margin
    def y_of(y):
        return _HEIGHT - _BOTTOM - (forward(y) - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)
    ticks = _nice(bottom, top)
    if logarithmic:
        decades = range(math.ceil(bottom), math.floor(top) + 1)
        ticks = [10.0 ** n for n in decades[::-(-len(decades) // 5)]] if len(decades) > 1 else [10.0 ** t for t in ticks]
    return y_of, ticks


def _nice(low: float, high: float, whole: bool = False) -> list[float]:
    """A few round numbers between `low` and `high`."""
    from matplotlib.ticker import MaxNLocator
    return [float(tick) for tick in MaxNLocator(5, integer=whole).tick_values(low, high) if low <= tick <= high]

"""The pictures of a comparison: curves with bands, finals with intervals, probabilities of improvement, time."""
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.compare.page import counted
from jaxrl_llm.compare.plan import UNITS, Budget
from jaxrl_llm.compare.report import METRIC, RunResult, curves
from jaxrl_llm.evaluation.comparison import mean_over_runs
from jaxrl_llm.tools.figures import COLORS, figure_file

_DASHES = ("-", "--", ":")
_PHASES = ("rollout", "reward", "record", "update")


def draw_all(results: Mapping[str, list[RunResult]], report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes curves, axes, final, improvement, diagnostics, tuning and time as PNG files into `folder`."""
    budget, names = Budget(**report["budget"]), names_width(report["order"])
    ordered = {label: results[label] for label in report["shown"]}
    style = {label: {"color": COLORS[i % len(COLORS)], "linestyle": _DASHES[i // len(COLORS) % len(_DASHES)]}
             for i, label in enumerate(report["order"])}
    chart: dict[str, tuple] = {
        "curves": ((10, 4.4), 1, 2, lambda axes: _curves(axes, ordered, budget, style)),
        "axes": ((10, 7.4), 2, 2, lambda axes: _axes(axes, ordered, report, style)),
        "diagnostics": ((12, 4), 1, 3, lambda axes: _diagnostics(axes, ordered, budget, style)),
        "final": ((6 + names, 1.2 + rows_height(len(style))), 1, 1, lambda axes: _final(axes[0], report, style)),
        "time": ((7 + names, 1.4 + rows_height(len(style))), 1, 1, lambda axes: _time(axes[0], report)),
    }
    if len(ordered) > 1:
        side = 1.2 + 0.8 * len(ordered) + names
        chart["improvement"] = ((side, side), 1, 1, lambda axes: _improvement(axes[0], report))
    if report.get("tuning"):
        columns = min(len(report["tuning"]), 3)
        rows = -(-len(report["tuning"]) // columns)
        settings = max(len(facts["grid"]) for facts in report["tuning"].values())
        chart["tuning"] = ((max(6.4, 4.8 * columns), rows * (1.4 + 0.35 * settings)), rows, columns,
                           lambda axes: _tuning(axes, report["tuning"]))
    return [save_figure(folder / f"{name}.png", *parts) for name, parts in chart.items()]


def shortened(label: str, most: int = 64) -> str:
    """A label with long settings, without its middle."""
    return label if len(label) <= most else f"{label[:most - 20]} ... {label[-15:]}"


def names_width(labels: Iterable[str]) -> float:
    """Inches of these labels beside a picture."""
    return 0.07 * max(len(shortened(label)) for label in labels)


def rows_height(count: int) -> float:
    """Inches of a picture with a row for each of `count` methods."""
    return (0.45 if count <= 20 else 0.2) * count


def save_figure(path: Path, size: tuple[float, float], rows: int, columns: int, draw: Callable[[list], object]) -> Path:
    """A PNG file of `size` inches; `draw` gets its `rows x columns` axes."""
    with figure_file(path, *size) as figure:
        draw([figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)])
    return path


def _tuning(axes, tuning) -> None:
    """Scores of every setting on tuning seeds (dots) with their mean (bar), and on testing seeds (crosses) if there are any."""
    from matplotlib.ticker import PercentFormatter
    for panel in axes[len(tuning):]:
        panel.set_axis_off()
    for panel, (label, facts) in zip(axes, tuning.items()):
        for place, (choice, scores) in enumerate(zip(facts["grid"], facts["scores"])):
            color = COLORS[1] if choice == facts["chosen"] else COLORS[0]
            shown = [x for x in scores if isinstance(x, float)]  # a failed run has none
            panel.plot(shown, [place] * len(shown), "o", color=color, alpha=0.5)
            if len(shown) == len(scores):
                panel.plot([np.mean(shown)] * 2, [place - 0.3, place + 0.3], color=color, linewidth=3)
            tests = [x for x in facts.get("test_scores", [[]] * len(facts["grid"]))[place] if isinstance(x, float)]
            panel.plot(tests, [place] * len(tests), "x", color="0.3")
        panel.set_yticks(range(len(facts["grid"])), facts["grid"])
        panel.invert_yaxis()
        if facts["metric"] == METRIC:
            panel.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
        tests = "; crosses: testing seeds" if "test_scores" in facts else ""
        panel.set_xlabel(f"{facts['metric']}; dots: tuning seeds{tests}")
        panel.set_title(f"{label} (orange: kept)")


def _band(axes, x, y, label, style, bands: int) -> None:
    """Interquartile mean of the runs `y [S, N]` with the interval of each point, fainter the more `bands` overlap."""
    interval = mean_over_runs(y, resamples=500)
    axes.plot(x, interval.value, linewidth=2, label=label, **style)
    axes.fill_between(x, interval.low, interval.high, color=style["color"], alpha=min(0.15, 0.5 / bands), linewidth=0)


def _learning(axes, results, unit, budget, style, since_start: bool = False) -> None:
    for label, runs in results.items():
        x, y = curves(runs, unit, budget, METRIC)
        if np.isfinite(y).any():
            gain = y - y[:, :1] if since_start else y
            _band(axes, x, gain, f"{label} ({counted(len(runs), 'seed')})", style[label], len(results))
    _budget_axis(axes, unit)
    _score_axis(axes)


def _legend(axes) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    labels = [shortened(label, 76) for label in labels]  # with their numbers of seeds
    columns = min(len(labels), max(1, 110 // max(map(len, labels))))
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _budget_axis(axes, unit) -> None:
    from matplotlib.ticker import EngFormatter
    axes.set_xlabel(UNITS[unit])
    axes.set_xlim(left=0)
    if axes.get_xlim()[1] >= 1e4:
        axes.xaxis.set_major_formatter(EngFormatter())


def _score_axis(axes) -> None:
    from matplotlib.ticker import PercentFormatter
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.set_ylabel("held-out score")


def _curves(axes, results, budget, style) -> None:
    for panel, since_start in zip(axes, (False, True)):
        _learning(panel, results, budget.unit, budget.size, style, since_start)
    axes[0].set_title("Held-out score")
    axes[1].set_title("Gain since the start, seed by seed")
    axes[1].set_ylabel("")
    _legend(axes)


def _axes(axes, results, report, style) -> None:
    for panel, unit in zip(axes, UNITS):
        _learning(panel, results, unit, report["common"][unit], style, since_start=True)
        panel.set_ylabel("gain of held-out score")
        panel.set_title(f"Equal {UNITS[unit]}")
    _legend(axes)


def _diagnostics(axes, results, budget, style) -> None:
    for panel, (metric, title) in zip(axes, (("reward/mean", "Training reward"), ("entropy", "Policy entropy, nats per token"),
                                             ("completion/length", "Completion length, tokens"))):
        for label, runs in results.items():
            x, y = curves(runs, budget.unit, budget.size, metric)
            if not np.isfinite(y).any():
                continue
            width = 10  # of 101 points: batches are noisy
            kernel = np.ones(width) / width
            smooth = np.array([np.convolve(row, kernel, mode="valid") for row in y])
            _band(panel, x[width // 2:width // 2 + smooth.shape[1]], smooth, label, style[label], len(results))
        panel.set_title(title)
        _budget_axis(panel, budget.unit)
    _legend(axes)


def _final(axes, report, style) -> None:
    from matplotlib.ticker import PercentFormatter
    for row, (label, numbers) in enumerate(reversed(report["methods"].items())):
        final = numbers["final"]
        axes.plot([final["low"], final["high"]], [row, row], color=style[label]["color"], linewidth=5, alpha=0.35,
                  solid_capstyle="butt")
        axes.plot([run["final"] for run in numbers["runs"]], [row] * len(numbers["runs"]), linestyle="", marker="|",
                  color=style[label]["color"], markersize=10)
        axes.plot(final["value"], row, marker="o", color=style[label]["color"], markeredgecolor="white", markersize=8)
    axes.set_yticks(range(len(report["order"])), [shortened(label) for label in reversed(report["order"])])
    axes.grid(axis="y", visible=False)
    axes.set_ylim(-0.6, len(report["order"]) - 0.4)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.set_title("Final held-out score")
    axes.set_xlabel("interquartile mean (dot), 95% interval (bar), runs (ticks)")


def _improvement(axes, report) -> None:
    order = report["shown"]
    table = np.array([[report["improvement"][a][b]["value"] if a != b else np.nan for b in order] for a in order])
    axes.imshow(table, cmap="RdBu", vmin=0, vmax=1)
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            if a != b:
                axes.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", fontsize=9,
                          color="white" if abs(table[i, j] - 0.5) > 0.35 else "black")
    names = [shortened(label) for label in order]
    axes.set_xticks(range(len(order)), names, rotation=40, ha="right")
    axes.set_yticks(range(len(order)), names)
    axes.grid(visible=False)
    axes.set_title("Row ends above column", fontsize=10)


def _time(axes, report) -> None:
    names = {name for numbers in report["methods"].values() for name in numbers["phases"]}
    names = sorted(names, key=lambda name: (_PHASES.index(name) if name in _PHASES else len(_PHASES), name))
    labels = list(reversed(report["order"]))
    left = np.zeros(len(labels))
    for i, name in enumerate(names):
        width = np.array([1000 * report["methods"][label]["phases"].get(name, 0.0) for label in labels])
        axes.barh(range(len(labels)), width, left=left, color=COLORS[i % len(COLORS)], label=name, height=0.6)
        left += width
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per step (median)")
    axes.set_title("Where the time went")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

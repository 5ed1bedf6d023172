"""An index of run folders: which of many runs belong together, as curves with bands and as a table."""
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.compare.ledger import RunMetrics, read_run
from jaxrl_llm.compare.plan import UNITS
from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic
from jaxrl_llm.evaluation import open_rl_benchmark as benchmark
from jaxrl_llm.show.runs import flat
from jaxrl_llm.tools import files
from jaxrl_llm.tools.figures import COLORS
from jaxrl_llm.tools.registry import one_of

_POINTS = 200  # of a curve


class BenchmarkRun(NamedTuple):
    """A run of the index: its folder, flat settings ("sampling.group" -> 8), measurements and costs."""

    folder: Path
    settings: dict[str, Any]
    run: RunMetrics


@diagnostic
def open_rl_benchmark(*, metric: str = "eval/score", unit: str = "tokens", by: Sequence[str] = ("task", "method"),
                      where: Sequence[str] = (), window: int = 1, last: int = 1) -> Diagnostic:
    """All runs below folders, filtered by their settings, grouped, as curves over seeds and a table (arXiv 2402.03046).

    Notes below the table name folders without a readable run, which are skipped, and groups with unequal numbers of seeds or
    unfinished runs. A band is the standard deviation over the runs of a group.

    Args:
      metric: name in metrics.jsonl, for example reward/mean with window=100 and last=100.
      unit: unit of the x axis: tokens, flops, seconds or steps.
      by: keys of the configuration whose values define a group.
      where: filters `"key=value"`, all of which a run must meet; `"key=a|b"` for one of several values.
      window: number of values of the metric that are averaged at each point, the last ones.
      last: number of values at the end whose mean the table shows.
    """
    one_of("unit", unit, UNITS)
    filters = [read_filter(text) for text in where]

    def measure(folders: Sequence[Path]) -> Result:
        records, notes = index(folders, unit)
        chosen = [record for record in records if all(meets(record.settings, *one) for one in filters)]
        groups: dict[str, list[BenchmarkRun]] = {}
        for record in chosen:
            made = np.isfinite(record.run.metrics.get(metric, np.zeros(0)))
            if made.any() and record.run.spent[unit][made][-1] > 0:
                group = ", ".join(str(record.settings.get(key, "(absent)")) or "(empty)" for key in by)
                groups.setdefault(group, []).append(record)
            else:
                notes.append(f"{record.folder}: no {metric} after a step")
        if not groups:
            raise ValueError(f"no run below {', '.join(map(str, folders))} has {metric} and meets {list(where)}; "
                             f"{len(records)} runs were read" + "".join(f"\n{note}" for note in notes))
        summaries = {name: group_of(group, metric, unit, window, last) for name, group in groups.items()}
        notes += cautions(summaries)
        rows = [{"group": name, "runs": len(one["runs"]), f"{metric} at the end": one["mean"], "deviation": one["deviation"],
                 UNITS[unit]: one["x"][-1]} for name, one in summaries.items()]
        tables = {f"{metric}, by {', '.join(by)}": rows}
        if notes:
            tables["To know"] = [{"note": note} for note in notes]
        return {"metric": metric, "unit": unit, "groups": summaries, "notes": notes, "tables": tables}

    return Diagnostic(measure, draw)


def read_filter(text: str) -> tuple[str, tuple[str, ...]]:
    """`"sampling.group=8|16"` as the key and the values; ValueError for any other form."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"cannot read the filter {text!r}; write key=value, or key=a|b")
    return key.strip(), tuple(value.strip() for value in values.split("|"))


def meets(settings: dict[str, Any], key: str, values: tuple[str, ...]) -> bool:
    """Whether a setting has one of the values; numbers are compared as numbers."""
    def same(given, wanted):
        try:
            return float(given) == float(wanted)
        except (TypeError, ValueError):
            return str(given) == wanted
    return key in settings and any(same(settings[key], value) for value in values)


def index(folders: Sequence[Path], unit: str) -> tuple[list[BenchmarkRun], list[str]]:
    """The runs in these folders and below them, by path, and a note on each that cannot be read."""
    places = sorted({file.parent for folder in folders for file in folder.rglob("config.json")})
    records, notes = [], []
    for place in places:
        try:
            run = read_run(place, ("steps", unit))
            if run is None:
                notes.append(f"{place}: nothing measured yet")
                continue
            settings = flat(files.read_object(place, "config.json")["config"])
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:  # cut short, or of another program
            notes.append(f"{place}: {type(error).__name__}: {error}")
            continue
        records.append(BenchmarkRun(place, settings, run))
    return records, notes


def group_of(group: Sequence[BenchmarkRun], metric: str, unit: str, window: int, last: int) -> Result:
    """Mean curve, band and final number of the runs of a group."""
    curves, ends, runs = [], [], []
    for folder, settings, run in group:
        made = np.isfinite(run.metrics[metric])
        curves.append((run.spent[unit][made], run.metrics[metric][made]))
        ends.append(benchmark.last_mean(run.metrics[metric][made], last))
        runs.append({"folder": str(folder), "seed": settings.get("seed"), "end": ends[-1],
                     "steps": int(run.metrics["step"][-1]), "of": settings.get("steps")})
    x, y = benchmark.on_common_grid(curves, _POINTS, window)
    return {"runs": runs, "x": x.tolist(), "curve": y.mean(axis=0).tolist(), "band": y.std(axis=0).tolist(),
            "mean": float(np.mean(ends)), "deviation": float(np.std(ends))}


def cautions(groups: dict[str, Result]) -> list[str]:
    """Differences between groups that weaken a comparison: numbers of runs, repeated seeds, unfinished runs."""
    notes, counts = [], {name: len(one["runs"]) for name, one in groups.items()}
    if len(set(counts.values())) > 1:
        notes.append("groups have different numbers of runs: " + ", ".join(f"{name}: {n}" for name, n in counts.items()))
    for name, one in groups.items():
        seeds = [run["seed"] for run in one["runs"]]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{name} has a seed twice: its runs differ in more than their seed, add a key to by=(...)")
        notes += [f"{run['folder']}: {run['steps']} of {run['of']} steps" for run in one["runs"]
                  if isinstance(run["of"], int) and run["steps"] < run["of"]]
    return notes


def draw(results, axes) -> None:
    """Mean and band of each group."""
    for color, (name, one) in zip(COLORS * 10, results["groups"].items()):
        x, mean, band = (np.array(one[key]) for key in ("x", "curve", "band"))
        axes[0].plot(x, mean, color=color, label=f"{name} ({len(one['runs'])})")
        axes[0].fill_between(x, mean - band, mean + band, color=color, alpha=0.15, linewidth=0)
    axes[0].set_xlabel(UNITS[results["unit"]])
    axes[0].set_ylabel(results["metric"])
    axes[0].legend()

"""The summary of runs for a terminal."""
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.show.runs import RunFolder, differences, phases
from jaxrl_llm.tools.visible import visible

_BARS = "▁▂▃▄▅▆▇█"


def print_summary(runs: Sequence[RunFolder], console: Console | None = None) -> None:
    """Prints results, curves in one line each, time by phase, problems, and the settings in which the runs differ."""
    console = console or Console()
    table = Table(title="Runs")
    table.add_column("")
    for run in runs:
        table.add_column(_text(run.name), justify="right")
    for label in dict.fromkeys(label for run in runs for label in run.facts):
        table.add_row(label, *[_text(run.facts.get(label, "")) for run in runs])
    for label, name in (("reward", "reward/mean"), ("score", "eval/score"), ("solved", "eval/solved")):
        table.add_row(f"{label} over steps", *[sparkline(run.metrics.get(name, np.zeros(0))) for run in runs])
    table.add_row("where the time went", *[_text(_shares(phases(run.metrics))) for run in runs])
    console.print(table)
    columns, rows = differences(runs)
    if rows:
        settings = Table(title="Settings that differ" + (" from the defaults" if len(runs) == 1 else ""))
        for column in ("key", *columns):
            settings.add_column(_text(column), overflow="fold")
        for key, values in rows:
            settings.add_row(*map(_text, (key, *values)))
        console.print(settings)
    for run in runs:
        for finding in run.findings:
            console.print(_text(f"{run.name}: {finding}", "yellow"))
    if any(run.findings for run in runs):
        console.print("docs/troubleshooting.md says what to do about these.", style="dim", highlight=False)


def sparkline(values: np.ndarray, width: int = 24) -> str:
    """The finite values as a line of bars from their lowest to their highest, each bar a mean if there are many."""
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    span = means.max() - means.min()
    levels = np.zeros(len(means), int) if span == 0 else np.round((means - means.min()) / span * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[level] for level in levels)


def _text(text: str, style: str = "") -> Text:
    """Text without markup and escape sequences, whatever the name of a folder, a configuration or a metric."""
    return Text(visible(text), style=style)


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    return ", ".join(f"{name} {part / total:.0%}" for name, part in list(seconds.items())[:3]) if total else ""

"""The contents of a run folder for display: settings, metrics, costs, problems."""
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl_llm.compare.ledger import read_run
from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.runs.progress import format_seconds
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.stored import whole_config
from jaxrl_llm.show.health import findings
from jaxrl_llm.store import bucket
from jaxrl_llm.store.begun import Begun, read_begun
from jaxrl_llm.store.workdir import starts_of
from jaxrl_llm.tools.visible import visible

_FIRST_AND_LAST = (("training reward", "reward/mean", "{:.3f}"), ("completion length", "completion/length", "{:.1f}"),
                   ("truncated", "completion/truncated", "{:.1%}"), ("entropy", "entropy", "{:.3f}"))
_BOOTSTRAP = "bootstrap"  # the metric of methods that begin as a simpler one
Metrics = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run: `config` is flat ("sampling.group" -> 8), `metrics` one `f64[N]` per name, `facts` label -> text.

    `begun`: its phases.
    """

    path: Path
    name: str
    config: dict[str, Any]
    metrics: Metrics
    facts: dict[str, str]
    findings: list[str]
    starts: list[dict[str, Any]]
    begun: list[Begun] = dataclasses.field(default_factory=list)


def read_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """The runs in these folders, each with the shortest name that distinguishes it from the others.

    Raises FileNotFoundError for a folder without config.json or metrics, ValueError for one that is given twice.
    """
    folders = [bucket.local(path, "samples") for path in paths]
    if len(set(folders)) < len(folders):
        raise ValueError(f"a run folder is given twice: {', '.join(map(str, folders))}")
    return [_read(folder, name) for folder, name in zip(folders, short_names(folders))]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as needed to distinguish all of them."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def differences(runs: Sequence[RunFolder]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """`(columns, rows)`: settings in which the runs differ, or a single run from the library's defaults, and their values."""
    columns = {run.name: run.config for run in runs}
    if len(runs) == 1:
        columns = {"default": flat(default_config().to_dict()), **columns}
    def show(config, key):
        return json.dumps(config[key]) if key in config else "(absent)"
    rows = [(key, [show(config, key) for config in columns.values()]) for key in sorted(set().union(*columns.values()))]
    return list(columns), [(key, values) for key, values in rows if len(set(values)) > 1]


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with dotted keys."""
    return flatten_dict(config, sep=".")


def phases(metrics: Metrics) -> dict[str, float]:
    """Seconds of each phase of the whole run, longest first; they add up to its wall time."""
    total = {name.removeprefix("time/"): float(np.nansum(values)) for name, values in metrics.items()
             if name.startswith("time/") and name != "time/step"}
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _read(path: Path, name: str) -> RunFolder:
    config, begun = whole_config(path), read_begun(path)
    ledger = read_run(path, ("steps", "tokens", "seconds"))
    if ledger is None:
        raise FileNotFoundError(f"{path} holds no metrics yet; wait for its first step")
    metrics = {visible(name): values for name, values in ledger.metrics.items()}  # rewards, which anyone may write, name them
    work = "environment" if config.environment else "task"  # an environment brings its own task
    parts = "; ".join(f"{key} = {config[key]}" for key in SLOTS if config[key])
    facts = {"method": config.method, **({"parts": parts} if parts else {}), work: config[work],
             **_of_phases(begun, int(metrics["step"][-1])), **_facts(metrics, ledger.spent, config.steps)}
    return RunFolder(path, name, flat(config.to_dict()), metrics, facts, findings(metrics), starts_of(path), begun)


def _of_phases(begun: Sequence[Begun], last: int) -> dict[str, str]:
    """The phases that have begun, with their first and last steps; nothing for a run without phases."""
    ends = [*(one.start for one in begun[1:]), last]
    shown = [f"{one.name} {one.start + 1} to {end}" for one, end in zip(begun, ends) if end > one.start]
    return {"phases": ", ".join(shown)} if shown else {}


def _facts(metrics: Metrics, spent: dict[str, np.ndarray], steps: int) -> dict[str, str]:
    """The key facts of a run."""
    facts = {"steps": f"{int(metrics['step'][-1])} of {steps}"}
    for what in ("score", "solved"):
        values = metrics.get(f"eval/{what}", np.zeros(0))
        at = np.flatnonzero(np.isfinite(values))
        if len(at):
            low, high = (metrics.get(f"eval/{what}_{side}", values)[at[-1]] for side in ("low", "high"))
            best = at[np.argmax(values[at])]
            facts[f"held-out {what}, first"] = f"{values[at[0]]:.1%}"
            facts[f"held-out {what}, last"] = f"{values[at[-1]]:.1%} ({low:.1%} to {high:.1%})"
            facts[f"held-out {what}, best"] = f"{values[best]:.1%} at step {int(metrics['step'][best])}"
    for label, name, form in _FIRST_AND_LAST:
        values = metrics.get(name, np.zeros(0))
        values = values[np.isfinite(values)]
        if len(values):
            facts[label] = f"{form.format(values[0])} \N{RIGHTWARDS ARROW} {form.format(values[-1])}"
    idle = metrics.get(_BOOTSTRAP, np.zeros(0))
    if np.isfinite(idle).any():
        facts["bootstrap steps"] = f"{np.nanmean(idle):.0%}"
    facts["tokens sampled"] = f"{spent['tokens'][-1]:,.0f}"
    facts["collecting and learning"] = format_seconds(float(spent["seconds"][-1]))
    facts["wall time"] = format_seconds(sum(phases(metrics).values()))
    return facts

"""Recipes as folders: one run, or several that differ in their seed."""
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.compare.ledger import RunMetrics, read_run
from jaxrl_llm.show.runs import short_names


def runs_of(folder: Path, units: tuple[str, ...] = ()) -> list[RunMetrics]:
    """The run in `folder`, or those in its subfolders; FileNotFoundError without any."""
    files = [folder / "metrics.jsonl", *sorted(folder.glob("*/metrics.jsonl"))]
    runs = [run for run in (read_run(file.parent, units) for file in files) if run is not None]
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run: metrics.jsonl is missing, in it and in its subfolders")
    return runs


def recipes_of(folders: Sequence[Path], units: tuple[str, ...] = ()) -> dict[str, list[RunMetrics]]:
    """The runs of each folder, by its shortest name."""
    return {name: runs_of(folder, units) for folder, name in zip(folders, short_names(folders))}

"""The interface of a diagnostic: a measurement of run folders, and its figure.

To add one, write a file with a keyword-only factory under `@diagnostic` that returns a `Diagnostic`:

    @diagnostic
    def final_score(*, metric: str = "eval/score") -> Diagnostic:
        \"\"\"The last held-out score of each run.\"\"\"
        def measure(folders):
            scores = {folder.name: float(read_metrics(folder)[metric][-1]) for folder in folders}
            return {"scores": scores, "tables": {"Last scores": [{"run": k, "score": v} for k, v in scores.items()]}}

        return Diagnostic(measure, lambda results, axes: axes[0].bar(list(results["scores"]), list(results["scores"].values())))
"""
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.compare.figures import save_figure
from jaxrl_llm.tools import registry

Result = dict[str, Any]


class Diagnostic(NamedTuple):
    """`measure(folders)` returns numbers, strings, lists and dicts; `draw(results, axes)` paints them.

    Under `tables` the result has the tables to read first, `{title: rows}`, all rows of a title with the same columns.
    `panels` axes side by side make a figure of `width x height` inches.
    """

    measure: Callable[[Sequence[Path]], Result]
    draw: Callable[[Mapping[str, Any], list], object]
    panels: int = 1
    width: float = 6.4
    height: float = 4.2

    def figure(self, results: Mapping[str, Any], path: Path) -> Path:
        """Writes the figure as PNG."""
        return save_figure(path, (self.width, self.height), 1, self.panels, lambda axes: self.draw(results, axes))


DIAGNOSTICS = registry.PartTable("diagnostic", Diagnostic)
diagnostic = DIAGNOSTICS.enter


def single(folders: Sequence[Path]) -> Path:
    """The one folder; ValueError for none or several."""
    if len(folders) != 1:
        raise ValueError(f"this diagnostic measures one run; {len(folders)} folders are given")
    return folders[0]


def strict(value: Any) -> Any:
    """The same with None for infinities and NaN, which strict JSON lacks; tuples become lists."""
    if isinstance(value, Mapping):
        return {str(name): strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

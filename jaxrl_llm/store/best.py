"""The weights of the best evaluation, kept beside the checkpoints of a run."""
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.store.bucket import AnyPath
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools.registry import unknown

FOLDER = "best"


class Best:
    """Keeps in `best/` the weights at the largest value of `metric`, the first of equal values; with "" nothing.

    "-eval/loss" is the smallest value of `eval/loss`.

    A run that continues from `start` takes the value of the weights that it kept. If these are of a later step, on a branch
    that the run left, or had no such value, the next evaluation is kept unconditionally. `records`: the folder of its metrics,
    if another.
    """

    def __init__(self, folder: AnyPath, metric: str, start: int, records: Path | None = None):
        self.metric, self.sign = metric.removeprefix("-"), -1 if metric[:1] == "-" else 1
        self.largest, self.store = -math.inf, None
        if not metric:
            return
        self.store = Checkpoints(folder / FOLDER, keep=1)
        lines = (records or folder) / "metrics.jsonl"
        kept, seen = self.store.steps(), read_metrics(lines) if start and lines.is_file() else {}
        if kept and kept[-1] <= start and self.metric in seen:
            kept_now = seen["step"] == kept[-1]  # the weights that are there: a larger value may not have been saved
            own = self.sign * seen[self.metric][kept_now]
            self.largest = float(max(own[own == own], default=-math.inf))

    def __enter__(self) -> "Best":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if self.store is not None:
            self.store.__exit__(kind, value, traceback)

    def see(self, step: int, metrics: Mapping[str, float], params: Any, lora: Any) -> None:
        """Keeps the weights if `metrics`, those of the evaluations of a step, have a larger value than all before.

        Raises ValueError if the first step, after which all evaluations are made, has no such metric.
        """
        if self.store is None:
            return
        if self.metric not in metrics:
            if step == 0:
                raise unknown("metric for config.checkpoint.best", self.metric, metrics)
            return
        if (value := self.sign * metrics[self.metric]) > self.largest:
            self.largest = value
            self.store.save(step, {"params": params} | ({} if lora is None else {"lora": lora}), {"value": self.largest})

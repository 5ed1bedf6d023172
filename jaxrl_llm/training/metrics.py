"""Metrics of a run: one JSON line per step, TensorBoard event files, seconds per phase, memory of the host."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

FILE_NAME = "metrics.jsonl"


class MetricWriter:
    """Writes flat dicts of scalars to `workdir`/metrics.jsonl and `workdir`/tensorboard.

    After a resume pass the step that was restored: what the dead process wrote beyond it is dropped, because those
    steps are about to be trained again. Without it both files start empty. `last_step` is that of the last line, or None.
    `also(step, metrics)` is told the same.
    """

    def __init__(self, workdir: str | Path, restored_step: int | None = None,
                 also: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None):
        from tensorboardX import SummaryWriter

        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / FILE_NAME
        kept = [] if restored_step is None else _lines_up_to(self.path, restored_step)
        if kept or self.path.is_file():
            _replace_text(self.path, "".join(kept))
        self.last_step = json.loads(kept[-1])["step"] if kept else None
        self._file, self._also = open(self.path, "a"), also
        # TensorBoard itself hides the events at and after `purge_step` that older files of the folder hold.
        purge_step = 0 if restored_step is None else restored_step + 1
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=purge_step)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line and flushes it; NaN and infinities become the strings "NaN", "Infinity", "-Infinity".

        Waits for the device if values are still being computed. Raises ValueError if `step` does not increase, a name
        is taken or a value is no scalar; OSError if the line cannot be written.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"write(step={step}) after step {self.last_step}: one line per step, in order; "
                "put all metrics of a step in one call"
            )
        if "step" in metrics:
            raise ValueError("the metric name 'step' is taken by the step itself; rename yours")
        values = {name: _as_float(name, value) for name, value in jax.device_get(dict(metrics)).items()}
        line = json.dumps({"step": int(step), **{name: _encode(value) for name, value in values.items()}})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"cannot append step {step} to {self.path}: {error.strerror}; check the free space"
            ) from error
        self.last_step = int(step)
        for name, value in values.items():
            if math.isfinite(value):  # tensorboardX warns about each other value without saying which
                self._events.add_scalar(name, value, step)
        self._also(int(step), values)

    def close(self) -> None:
        """Flushes and closes both files."""
        self._events.close()
        self._file.close()


class PhaseTimer:
    """Wall seconds per phase of a step: `with timer("rollout"): ...`, then `timer.collect()` once per step.

    JAX returns before the device is done: wait for the result (`jax.block_until_ready`) inside the block, or the time
    of one phase is counted in the next.
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._open: str | None = None
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._open is not None:
            raise ValueError(f"phase {phase!r} begins inside {self._open!r}: nested phases would be counted twice")
        self._open, start = phase, time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._open = None

    def collect(self) -> dict[str, float]:
        """Seconds since the last call as time/<phase> and the rest as time/other: together the wall time."""
        now = time.perf_counter()
        elapsed = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        elapsed["time/other"] = max(0.0, now - self._start - sum(self._seconds.values()))
        self._seconds, self._start = {}, now
        return elapsed


def host_memory() -> dict[str, float]:
    """Resident memory of this process in GB (1e9 bytes) as host/rss_gb: a leak shows as a rising line."""
    return {"host/rss_gb": psutil.Process().memory_info().rss / 1e9}


def read_metrics(path: str | Path) -> dict[str, np.ndarray]:
    """metrics.jsonl (or the folder that holds it) as "step" i64[N] and one f64[N] per name, NaN where a step lacks it.

    A last line cut short by a kill is left out. Raises FileNotFoundError, or ValueError with the number of a broken
    line.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no metrics file {path}; give a run folder or its {FILE_NAME}")
    rows = [json.loads(line) for line in _lines_up_to(path, math.inf)]
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: np.array([float(row.get(name, "nan")) for row in rows], np.float64) for name in names}
    return {"step": np.array([row["step"] for row in rows], np.int64), **columns}


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, str) or np.ndim(value) != 0:
        raise ValueError(
            f"metric {name!r} is {type(value).__name__}{list(np.shape(value))}, not a scalar; reduce it first"
        )
    return float(value)


def _encode(value: float) -> float | str:
    """Strict JSON has no NaN; `float()` reads these strings back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _lines_up_to(path: Path, last_step: float) -> list[str]:
    """The complete lines of steps <= last_step, with their line ends."""
    if not path.is_file():
        return []
    with open(path) as file:
        lines = file.readlines()
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no metrics line: {line[:80]!r}; remove it") from error
        if step <= last_step:
            kept.append(line)
    return kept


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

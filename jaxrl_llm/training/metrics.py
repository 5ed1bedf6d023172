"""Metrics of a run: one JSON line per step, TensorBoard event files, seconds per phase, memory of the host."""
import contextlib
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jaxrl_llm import files

FILE_NAME = "metrics.jsonl"
_FLUSH_SECONDS = 120  # between writes of TensorBoard events to the disk: each waits for it


class MetricWriter:
    """Writes flat dicts of scalars to `workdir`/metrics.jsonl and `workdir`/tensorboard.

    After a resume pass the restored step: lines that the dead process wrote beyond it are dropped, because those steps
    will be trained again. Without it both files start empty. `last_step` is the step of the last line, or None.
    `also(step, metrics)` is called with the same values.
    """

    def __init__(self, workdir: str | Path, restored_step: int | None = None,
                 also: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None):
        workdir = Path(workdir)
        self.path, self._also = workdir / FILE_NAME, also
        kept = [] if restored_step is None else lines_up_to(self.path, restored_step)
        self.last_step = json.loads(kept[-1])["step"] if kept else None
        with naming(f"begin {self.path}"):
            workdir.mkdir(parents=True, exist_ok=True)
            if kept or self.path.is_file():
                replace_text(self.path, "".join(kept))
            self._file = open(self.path, "a")
            self._events = _Events(workdir / "tensorboard", 0 if restored_step is None else restored_step + 1)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line and flushes it; NaN and infinities become the strings "NaN", "Infinity", "-Infinity".

        Waits for the device if values are still being computed. Raises ValueError if `step` does not increase, a name
        is taken or a value is not a scalar; OSError if the line cannot be written.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"write(step={step}) after step {self.last_step}: one line per step, in order; "
                             "put all metrics of a step in one call")
        if "step" in metrics:
            raise ValueError("the metric name 'step' is taken by the step itself; rename yours")
        values = {name: _as_float(name, value) for name, value in jax.device_get(dict(metrics)).items()}
        line = json.dumps({"step": int(step), **{name: _encode(value) for name, value in values.items()}})
        with naming(f"append step {step} to {self.path}"):
            self._file.write(line + "\n")
            self._file.flush()
        self.last_step = int(step)
        with naming(f"append step {step} to {self._events.path}"):
            self._events.write(int(step), {name: value for name, value in values.items() if math.isfinite(value)})
        self._also(int(step), values)

    def close(self) -> None:
        """Closes both files. Every line has been written out, so an error here is only a warning."""
        for file in (self._events, self._file):
            try:
                file.close()
            except OSError as error:
                warnings.warn(f"the metrics of {self.path.parent} were not closed: {error}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Hides `module` from imports within the block, unless it is loaded: tensorboardX loads all of PyTorch for seconds."""
    hidden = module not in sys.modules
    if hidden:
        sys.modules[module] = None
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]


class _Events:
    """A TensorBoard event file in `folder`, written by the caller's own thread.

    The thread of `tensorboardX.SummaryWriter` dies on a full disk, and its caller then waits forever.
    """

    def __init__(self, folder: Path, purge_step: int):
        with _without("torch"):
            from tensorboardX.proto.event_pb2 import SessionLog
            from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
        self._file, self._flushed = RecordWriter(str(self.path)), -math.inf
        self._add(file_version="brain.Event:2")
        # TensorBoard itself hides events at and after `purge_step` in older files of the folder.
        self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **content) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **content).SerializeToString())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        self._add(step=step, summary=Summary(value=[scalar(name, value).value[0] for name, value in values.items()]))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
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
    """metrics.jsonl (or its folder) as "step" i64[N] and one f64[N] per name, NaN where a step lacks it.

    A last line cut short by a kill is dropped. Raises FileNotFoundError, or ValueError with the number of a broken line.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"no metrics file {path}; give a run folder or its {FILE_NAME}")
    rows = [json.loads(line) for line in lines_up_to(path, math.inf)]
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: np.array([float(row.get(name, "nan")) for row in rows], np.float64) for name in names}
    return {"step": np.array([row["step"] for row in rows], np.int64), **columns}


@contextlib.contextmanager
def naming(action: str) -> Iterator[None]:
    """Adds the failed action to an OSError raised within; by itself a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot {action}: {error.strerror}; check the free space") from error


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, str) or np.ndim(value) != 0:
        raise ValueError(f"metric {name!r} is {type(value).__name__}{list(np.shape(value))}, not a scalar; reduce it first")
    return float(value)


def _encode(value: float) -> float | str:
    """Strict JSON has no NaN; `float()` reads these strings back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def lines_up_to(path: Path, last_step: float) -> list[str]:
    """The complete lines of steps <= last_step of a file of JSON lines, with their line ends; none if there is no file.

    Raises ValueError with the number of a line that is broken or has no step.
    """
    target = path.resolve()  # metrics may lie on another disk
    lines = list(files.lines(target.parent, target.name))
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no JSON object with a step: {line[:80]!r}; remove it") from error
        if step <= last_step:
            kept.append(line)
    return kept


def replace_text(path: Path, text: str) -> None:
    """Replaces a file's content in one step, so that a kill leaves the old or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

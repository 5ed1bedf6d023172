"""Metrics of a run: one JSON line per step, TensorBoard event files, seconds per phase, memory of the host."""
import contextlib
import json
import math
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

from jaxrl_llm.store.lines import FILE_NAME, lines_up_to, naming, replace_text

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


def host_memory() -> dict[str, float]:
    """Resident memory of this process in GB (1e9 bytes) as host/rss_gb: a leak shows as a rising line."""
    return {"host/rss_gb": psutil.Process().memory_info().rss / 1e9}


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, str) or np.ndim(value) != 0:
        raise ValueError(f"metric {name!r} is {type(value).__name__}{list(np.shape(value))}, not a scalar; reduce it first")
    return float(value)


def _encode(value: float) -> float | str:
    """Strict JSON has no NaN; `float()` reads these strings back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")



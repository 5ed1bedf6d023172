"""The JSON lines of a run: read up to a step, and replaced in one step."""
import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrl_llm.tools import files

FILE_NAME = "metrics.jsonl"


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

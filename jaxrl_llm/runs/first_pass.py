"""A pass over training problems before a step, for controllers that want to know who solves them: it survives a kill."""
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control import knobs
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.sampling import asked
from jaxrl_llm.sampling.asked import Asked
from jaxrl_llm.setup.run import Run
from jaxrl_llm.store import preemption
from jaxrl_llm.tools.timer import PhaseTimer

FILE = "asked.json"  # in the folder of a run: the measure of one step, as far as it has come
_STREAM = 2**31 - 6  # folded into the run's key, then the step


def wanted(run: Run, state: TrainState) -> np.ndarray | None:
    """i32[N], how often controllers want each training problem to be asked now; None: no problem is asked."""
    controls = run.learner.controls
    if asked.TIMES.name not in controls.knobs:
        return None
    proposed = controls.proposed(state.control)
    times = knobs.read([asked.TIMES], proposed, run.source.numbers, controls.setters)[asked.TIMES.name]
    return times if times.any() else None


def measured(run: Run, state: TrainState, seen: tuple[Any, Any], times: np.ndarray, folder: Path, progress: Progress,
             timer: PhaseTimer, origin: int = 0, again: bool = False) -> Asked:
    """The whole measure with the weights `seen`; a run that was resumed (`again`) continues one that this step had begun.

    `origin`: the steps of the run before its phase.
    """
    step, total = origin + int(state.step), int((times > 0).sum())
    begun = parallel.first(_begun(folder / FILE, step, times) if again else asked.none(len(times)))
    key = jax.random.fold_in(jax.random.fold_in(state.key, _STREAM), int(state.step))
    progress.phase("asking training problems", begun.done, total)
    for begun in asked.ask(run.source, *seen, times, key, begun, timer):
        if parallel.is_primary():
            _keep(folder / FILE, step, times, begun)
        progress.phase("asking training problems", begun.done, total)
        preemption.check()
    progress.note(begun.summary)
    return begun


def _begun(path: Path, step: int, times: np.ndarray) -> Asked:
    """What the file holds of this measure: of another one, or without a readable file, nothing."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["step"] == step and stored["times"] == times.tolist():
            return Asked(np.array(stored["tried"], np.int32), np.array(stored["right"], np.int32), stored["done"])
    except (OSError, ValueError, KeyError):
        pass
    return asked.none(len(times))


def _keep(path: Path, step: int, times: np.ndarray, begun: Asked) -> None:
    """Writes the file; a reader never sees a part of it."""
    content = {"step": step, "times": times.tolist(), "tried": begun.tried.tolist(), "right": begun.right.tolist(),
               "done": begun.done}
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)

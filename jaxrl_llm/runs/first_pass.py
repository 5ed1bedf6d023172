"""A pass over training problems before a step, for controllers that want to know who solves them: it survives a kill."""
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.control import knobs
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.sampling import asked
from jaxrl_llm.sampling.asked import Asked
from jaxrl_llm.setup import keys
from jaxrl_llm.setup.run import Run
from jaxrl_llm.store import preemption
from jaxrl_llm.store.workdir import config_changes
from jaxrl_llm.tools.timer import PhaseTimer

FILE = "asked.json"  # in the folder of a run: the measure of one step, as far as it has come
# Answers depend on keys that begin so, without those of costs.
_READ = ("seed", "task", "reward", "score", "environment", "model.", "prompts.", "sampling.", "server.", "warmup.")
_COSTS = ("sampling.engine", "sampling.micro_batches", "sampling.paged_cache", "sampling.tensor", "server.deadline",
          "server.max_mismatch", "server.reload")
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

    `origin`: the steps of the run before its phase. Raises ValueError for a measure that was begun under another configuration.
    """
    step, total = origin + int(state.step), int((times > 0).sum())
    under = answered_under(run.config)
    begun, wrong = parallel.first(_begun(folder / FILE, step, times, under) if again else (asked.none(len(times)), ""))
    if wrong:  # in every process, or the others would wait for the first
        raise ValueError(wrong)
    key = jax.random.fold_in(jax.random.fold_in(state.key, _STREAM), int(state.step))
    progress.phase("asking training problems", begun.done, total)
    for begun in asked.ask(run.source, *seen, times, key, begun, timer):
        if parallel.is_primary():
            _keep(folder / FILE, step, times, begun, under)
        progress.phase("asking training problems", begun.done, total)
        preemption.check()
    progress.note(begun.summary)
    return begun


def answered_under(config: ConfigDict) -> dict[str, Any]:
    """The keys that the answers depend on, with their values."""
    return {key: value for key, value in keys.flat(config).items() if key.startswith(_READ) and key not in _COSTS}


def _begun(path: Path, step: int, times: np.ndarray, under: dict[str, Any]) -> tuple[Asked, str]:
    """What the file holds of this measure, of another one or without a readable file nothing, and what is wrong with it.

    That is "" unless the answers were given under another configuration than `under`; earlier versions recorded fewer keys.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        begun = Asked(np.array(stored["tried"], np.int32), np.array(stored["right"], np.int32), stored["done"])
        same = stored["step"] == step and stored["times"] == times.tolist()
        recorded = dict(stored.get("config", {}))
        changes = config_changes(recorded, json.loads(json.dumps({key: under[key] for key in under if key in recorded})))
    except (OSError, ValueError, KeyError, TypeError):
        return asked.none(len(times)), ""
    if not same:
        return asked.none(len(times)), ""
    if not changes:
        return begun, ""
    return begun, (f"{path} has answers to {begun.done} training problems under another configuration ({'; '.join(changes)}), "
                   "and answers to the rest would not go with them; continue with the former values, or delete the file: all "
                   "problems are asked again")


def _keep(path: Path, step: int, times: np.ndarray, begun: Asked, under: dict[str, Any]) -> None:
    """Writes the file; a reader never sees a part of it."""
    content = {"step": step, "times": times.tolist(), "tried": begun.tried.tolist(), "right": begun.right.tolist(),
               "done": begun.done, "config": under}
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)

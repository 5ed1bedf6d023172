"""Policies of run folders: their checkpoints, and their results on prompts."""
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.sampling.heldout import sample_held_out
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.start import is_run
from jaxrl_llm.setup.stored import stored_config
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.tasks import text_of
from jaxrl_llm.values import encoder


def checkpoints(folder: str | Path, *, newest: bool = False) -> Iterator[tuple[int, setup.Run, dict, dict | None]]:
    """`(step, run, params, lora)` of every checkpoint of a run, or of the newest; FileNotFoundError if it is not a run."""
    if not is_run(Path(folder)):
        raise FileNotFoundError(f"{folder} is no run folder: its config.json is missing; give the --workdir of a training run")
    run, params = setup.build(stored_config(Path(folder)))
    target = setup.initial_state(run, params)
    with Checkpoints(Path(folder) / "checkpoints", read_only=True) as stored:
        steps = stored.steps()
        for step in steps[-1:] if newest else steps:
            restored = stored.restore(target, step)
            yield step, run, restored.state.params, restored.state.lora


def problems_of(run: setup.Run, count: int) -> list:
    """`count` problems, half of them held out from training; the same for every policy of a task."""
    return held_out(run.source.task.train, count - count // 2) + held_out(run.source.task.heldout, count // 2)


def outcomes(run: setup.Run, params, lora, problems: list, key) -> list[tuple[str, float]]:
    """(prompt, share of right completions in one group) of every problem that fits."""
    source = dataclasses.replace(run.source, task=dataclasses.replace(run.source.task, heldout=problems))
    forest = sample_held_out(source, params, lora, len(problems), key)
    right = forest.components[forest.ends, 0].reshape(len(forest.problems), -1).mean(1)
    return [(text_of(problem), float(np.clip(share, 0, 1))) for problem, share in zip(forest.problems, right)]


def written_outcomes(folder: str | Path) -> Iterator[tuple[int, str, float]]:
    """(step, prompt, outcome) of every completion in a run's samples: prompts as the policy saw them, special tokens too."""
    for path in sorted((Path(folder) / "samples").glob("step_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["step"], row["prompt"], float(np.clip(next(iter(row["components"].values())), 0, 1))


def load_encoder(path: str, **options) -> encoder.Encoder:
    """The encoder of a published model, or the newest policy of a run folder."""
    if not is_run(Path(path)):
        return encoder.load(path, **options)
    _, run, params, lora = next(checkpoints(path, newest=True))
    if lora is not None:
        raise ValueError(f"{path} was trained with adapters; give its base model, {run.config.model.path}, as the encoder")
    return encoder.of_model(run.learner.policy.model, jax.device_put(params), run.source.stream.tokenizer, **options)

"""Warm starts that runs share: weights after the supervised warm-up, in a folder, under a hash of all that made them."""
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.setup import setup
from jaxrl_llm.store.checkpoints import Checkpoints, checksums
from jaxrl_llm.tasks.base import Problem

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "optax")


def key_of(run: setup.Run, params) -> str:
    """24 hexadecimal digits of a hash of all that the weights after the warm-up of `params` depend on, to the last bit."""
    c, stream, policy = run.config, run.source.stream, run.learner.policy
    made_of: dict[str, Any] = {
        "first weights": checksums(params), "model": c.model.to_dict(), "temperature": policy.temperature,
        "warm-up": c.warmup.to_dict(), "micro-batches": c.learner.micro_batches, "seed": c.seed,
        "problems": _digest(run.source.task.train), "overlong": c.prompts.overlong,
        "lengths": [stream.prompt_tokens, c.sampling.max_tokens],
        "devices": [str(jax.devices()[0].device_kind), dict(run.learner.mesh.shape)],
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES}}
    if stream.partner.goes_on:
        ladders, s = run.source.ladders, c.sampling
        made_of["environment"] = [c.environment, stream.turns, s.turn_tokens, s.observation_tokens, list(ladders.tokens),
                                  list(ladders.prompt_tokens)]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _digest(problems) -> str:
    """A hash of the prompts, answers and solutions of all problems, in their order."""
    def text(problem: Problem) -> str:
        prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
        return json.dumps([prompt, problem.answer, problem.extra.get("solution")], sort_keys=True, default=str)

    whole = hashlib.sha256()
    for number in range(len(problems)):
        whole.update(text(problems[number]).encode() + b"\n")
    return whole.hexdigest()


def shared(folder: Path, run: setup.Run, params, progress, make: Callable[[], Any]) -> Any:
    """The weights that an equal run has left in `folder`; else those that `make()` returns, which are left there.

    A file is complete or not there: it is written elsewhere and renamed. What is damaged is made anew, with a warning.
    """
    place = folder.absolute() / key_of(run, params)
    if place.is_dir():
        progress.phase(f"loading the warm start {place}")
        try:
            with Checkpoints(place, read_only=True) as stored:
                return stored.restore(params).state
        except OSError as error:
            warnings.warn(f"the warm start {place} cannot be read ({error}): it is made anew", RuntimeWarning, stacklevel=2)
            shutil.rmtree(place, ignore_errors=True)
    made = make()
    part = place.with_name(f".{place.name}.{platform.node()}.{os.getpid()}")  # containers may share a folder
    with Checkpoints(part, keep=1) as stored:
        stored.save(0, made)
    try:
        part.rename(place)
    except OSError:  # another run was faster
        shutil.rmtree(part, ignore_errors=True)
    return made

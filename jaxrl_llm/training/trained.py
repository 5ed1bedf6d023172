"""The policy of a run folder, for whatever is done with it after training. The method that trained it is not needed."""
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrl_llm.models import weights
from jaxrl_llm.models.lora import merge
from jaxrl_llm.training import setup
from jaxrl_llm.training.best import FOLDER
from jaxrl_llm.training.checkpoints import Checkpoints
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.source import Source
from jaxrl_llm.training.workdir import load_code, stored_config


class Trained(NamedTuple):
    """Weights and adapters (None: without) of `step`, the `source` that samples with them, and the resolved `config`."""

    config: ConfigDict
    policy: Policy
    source: Source
    params: Any
    lora: Any
    step: int


def untrained(config: ConfigDict) -> Trained:
    """The policy that a configuration starts with, before any warm-up."""
    config, policy, source, params = setup.build_policy(config)
    return Trained(config, policy, source, params, setup.initial_adapters(config, params), 0)


def trained(workdir: Path, step: int | None = None, task: str | None = None, best: bool = False) -> Trained:
    """The policy of a checkpoint of a run, the newest one or that of `step`, with the run's own task or another one.

    With `best` the weights that `config.checkpoint.best` kept.

    Raises:
      FileNotFoundError: no run folder, or no checkpoint of that step.
    """
    load_code(workdir)  # tasks and rewards
    config = stored_config(workdir)
    if task:
        config.task = task
    start = untrained(config)
    target = {"params": start.params} | ({} if start.lora is None else {"lora": start.lora})
    with Checkpoints(workdir / (FOLDER if best else "checkpoints"), read_only=True) as checkpoints:
        found = checkpoints.restore(target, step, part=True)
    return start._replace(params=found.state["params"], lora=found.state.get("lora"), step=found.step)


def export(workdir: Path, directory: Path, step: int | None = None, adapter: bool = False, best: bool = False) -> int:
    """Writes the model of a checkpoint as a Hugging Face directory, adapters merged in, with its tokenizer; returns its step.

    With `adapter` the adapters alone, for PEFT and vLLM; with `best` of the weights that `config.checkpoint.best` kept. Raises
    ValueError where the run trained no adapter.
    """
    found = trained(workdir, step, best=best)
    architecture, tokenizer = found.policy.model.config, found.source.sampler.tokenizer
    if adapter and found.lora is None:
        raise ValueError(f"{workdir} trained all weights (lora.rank=0), so there is no adapter; export without --adapter")
    if adapter:
        weights.save_peft(directory, architecture, jax.device_get(found.lora), found.config.model.path)
        return found.step
    params = found.params if found.lora is None else merge(found.params, found.lora)
    files = setup.tokenizer_source(found.config)
    weights.save_hf(directory, architecture, jax.device_get(params), files)
    if files is None:
        tokenizer.save(directory)
    return found.step

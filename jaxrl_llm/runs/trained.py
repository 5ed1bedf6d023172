"""The policy of a run folder, for use after training. The method that trained it is not needed."""
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import weights
from jaxrl_llm.models.lora import joined, merge
from jaxrl_llm.models.weights import peft
from jaxrl_llm.parallel.rules import path_name
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.first_state import initial_adapters
from jaxrl_llm.setup.meshes import sampling_mesh
from jaxrl_llm.setup.start import DTYPES, described, run_at, tokenizer_source
from jaxrl_llm.setup.stored import stored_config
from jaxrl_llm.setup.streams import stop_ids
from jaxrl_llm.store import bucket
from jaxrl_llm.store.best import FOLDER
from jaxrl_llm.store.bucket import AnyPath
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.workdir import load_code
from jaxrl_llm.tokenizers.described import write_chat_templates
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.tools.registry import one_of

EXPORTED = DTYPES | {"float16": np.float16}  # precisions of an exported model


class Trained(NamedTuple):
    """Weights and adapters (None: without) of `step`, the `source` that samples with them, and the resolved `config`."""

    config: ConfigDict
    policy: Policy
    source: Source
    params: Any
    lora: Any
    step: int


def with_task(config: ConfigDict, task: str) -> None:
    """Replaces the task of a configuration, and its rewards by those of the task.

    Raises ValueError with an environment, which has its own task.
    """
    if config.environment:
        raise ValueError(f"the environment {config.environment!r} brings its own task and reward, so --task={task!r} has no "
                         "effect; leave --task out")
    config.task, config.rewards, config.score = task, "", ""


def untrained(config: ConfigDict, mesh: Mesh | None = None) -> Trained:
    """The policy that a configuration starts with, before any warm-up, on a mesh; None: that of `config.mesh`."""
    config, policy, source, params = setup.build_policy(config, mesh)
    lora = initial_adapters(config, params)
    return Trained(config, policy, source, params, parallel.put(lora, parallel.tree_shardings(lora, source.stream.mesh)), 0)


def mesh_here(workdir: AnyPath, config: ConfigDict) -> Mesh:
    """The mesh of a run where it fits the devices here; else one that shards weights over them, which a line announces.

    Of the devices it has the largest number that divides the prompts of a sampler's call.
    """
    try:
        return sampling_mesh(config)
    except ValueError:
        config.sampling.tensor = 0  # it was one of that mesh
        devices, prompts = jax.devices(), config.prompts.per_step // config.sampling.micro_batches
        count = max(n for n in range(1, len(devices) + 1) if prompts % n == 0)
        sizes = ", ".join(f"{axis}={size}" for axis, size in config.mesh.items())
        print(f"note: the mesh of {workdir} ({sizes}) does not fit the number of devices here ({len(devices)}); it is replaced "
              f"by data=1, fsdp={count}, tensor=1, seq=1", file=sys.stderr)
        return parallel.make_mesh(data=1, fsdp=count, devices=devices[:count])


def trained(workdir: AnyPath, step: int | None = None, task: str | None = None, best: bool = False, average: bool = False
            ) -> Trained:
    """The policy of a run's newest checkpoint, or that of `step`, with the run's own task or another one and its rewards.

    With `best` the weights that `config.checkpoint.best` kept, with `average` the moving average of `config.optimizer.ema`. The
    devices may be others than those of the run, see `mesh_here`.

    Raises:
      FileNotFoundError: no run folder, or no checkpoint of that step.
      ValueError: no average was kept, the average of the best weights is requested, or another task in an environment.
    """
    records = bucket.local(workdir)
    load_code(records)  # tasks and rewards
    config = stored_config(records, step)
    config.server.url = ""  # it may be gone, or have other weights than this checkpoint
    if task:
        with_task(config, task)
    if average and (best or not config.optimizer.ema):
        raise ValueError(f"{workdir} has no moving average of its {'best ' * best}weights: averages lie in the checkpoints "
                         "of runs that are started with, for example, --config.optimizer.ema=0.99")
    start = untrained(config, mesh_here(workdir, config))
    names = {"params": "params", "lora": "lora"}  # of the trees in the checkpoint
    if average:
        names["params" if start.lora is None else "lora"] = "average"
    target = {stored: described(getattr(start, name)) for name, stored in names.items() if getattr(start, name) is not None}
    start = start._replace(params=None, lora=None)  # frees memory for the weights of the checkpoint
    with Checkpoints(bucket.stored(workdir, FOLDER if best else "checkpoints", step), read_only=True) as checkpoints:
        restored = checkpoints.restore(target, step, part=True)
    return start._replace(**{name: restored.state.get(stored) for name, stored in names.items()}, step=restored.step)


def export(workdir: AnyPath, directory: Path, step: int | None = None, adapter: bool = False, best: bool = False,
           average: bool = False, dtype: str = "") -> int:
    """Writes the model of a checkpoint as a Hugging Face directory, adapters merged in, with its tokenizer and chat templates.

    generation_config.json and config.json name all tokens at which the run ended completions; a line names texts that did.
    Returns the step. With `adapter` it writes only the adapters, for PEFT and vLLM, together with those that the run started
    from; `best` and `average` as in `trained`. `dtype` is one of `EXPORTED`; empty: the run's `model.dtype`, and float32 for
    adapters. Raises the errors of `trained`, and ValueError if the run has no adapter of a model that other programs read, or
    for a weight that the dtype cannot hold.
    """
    wanted = EXPORTED[one_of("dtype", dtype, EXPORTED)] if dtype else None
    if adapter:
        check_adapter(workdir, stored_config(bucket.local(workdir), step))
    run = trained(workdir, step, best=best, average=average)
    architecture, tokenizer = run.policy.model.config, run.source.stream.tokenizer
    if adapter:
        base, lora = expanded(run.config.model.path), jax.device_get(run.lora)  # PEFT reads no ~
        if peft.is_adapter(base):
            lora, base = joined(peft.adapters(base, architecture), lora), peft.base_of(base)
        weights.save_peft(directory, architecture, cast(lora, wanted or np.float32), str(base))
        return run.step
    params = run.params if run.lora is None else merge(run.params, run.lora)
    files, strings = tokenizer_source(run.config.model), run.config.sampling.stop_strings
    if files is None:
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory)
    weights.save_hf(directory, architecture, cast(params, wanted or DTYPES[run.config.model.dtype]), files,
                    stop_ids=stop_ids(tokenizer, strings))
    write_chat_templates(directory, tokenizer.chat_templates)
    if longer := [text for text in strings if len(tokenizer.encode(text)) > 1]:
        print(f"note: completions of {workdir} also end at the texts {longer}, which no file states for all programs; "
              "give them with each request, as `stop` to servers and as `stop_strings` to transformers", file=sys.stderr)
    return run.step


def cast(tree: Any, dtype: Any) -> Any:
    """The arrays on the host in another precision; ValueError for numbers beyond those of float16."""
    def one(path, x):
        x = jax.device_get(jax.numpy.asarray(x, dtype))
        if dtype == np.float16 and np.isinf(x).any():
            raise ValueError(f"{path_name(path)} holds a weight beyond 65504, the largest number of float16; give "
                             "--dtype=bfloat16 or --dtype=float32")
        return x
    return jax.tree.map_with_path(one, tree)


def check_adapter(workdir: AnyPath, config: ConfigDict) -> None:
    """Raises ValueError if the run trained no adapter, or one on weights that are not those of `model.path`."""
    if not config.lora.rank:
        raise ValueError(f"{workdir} trained all weights (lora.rank=0), so there is no adapter; export without --adapter")
    base = "" if config.model.path else "new weights (model.path is empty)"
    if run_at(config.model.path) is not None:
        base = f"the weights of the run {config.model.path}"
    if config.model.path and not base and not (_published(config.model.path) / "config.json").is_file():
        base = f"a GGUF file ({config.model.path})"
    if config.warmup.steps:  # it trains all weights
        base = f"the weights after its warm-up (warmup.steps={config.warmup.steps})"
    if base:
        raise ValueError(f"the adapter of {workdir} belongs to {base}, which no other program reads; export without --adapter, "
                         "which merges it in, or train an adapter of a Hugging Face directory with warmup.steps=0")


def _published(path: str) -> Path:
    """The model at a `model.path`; of an adapter, its base."""
    folder = Path(path).expanduser()
    return peft.base_of(folder) if peft.is_adapter(folder) else folder

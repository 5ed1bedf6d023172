"""The model that a run starts with: a published one, another run's, or a new one."""
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import parallel, tokenizers
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.setup.stored import stored_config
from jaxrl_llm.store.best import FOLDER
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.tokenizers.loading import FILES, folder_of
from jaxrl_llm.tools.files import expanded, read_object
from jaxrl_llm.tools.written import keywords

DTYPES = {"float32": np.float32, "bfloat16": jax.numpy.bfloat16}


class Start(NamedTuple):
    """Weights that another run saved: its `folder`, its `store` of checkpoints, and the `step` (None: the newest)."""

    folder: Path
    store: str
    step: int | None


def run_at(path: str) -> Start | None:
    """The run that a `model.path` names, `runs/x`, `runs/x/checkpoints/100` or `runs/x/best`; None for any other path."""
    given = expanded(path)
    if path and is_run(given):
        return Start(given, "checkpoints", None)
    if given.name == FOLDER and is_run(given.parent):
        return Start(given.parent, FOLDER, None)
    if given.parent.name == "checkpoints" and given.name.isdecimal() and is_run(given.parent.parent):
        return Start(given.parent.parent, "checkpoints", int(given.name))
    return None


def is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run; the config.json of a published model has other keys."""
    file = folder / "config.json"
    try:
        return "schema_version" in (read_object(folder, file.name) or {})
    except ValueError:  # the reader of the model reports the error
        return False


def check_other(path: str, workdir: Path) -> None:
    """Raises ValueError for a run that would start with its own weights; `resume` does that."""
    start = run_at(path)
    if start is not None and start.folder.absolute() == workdir.absolute():
        raise ValueError(f"model.path={path} is the run of this workdir; continue it with --resume, or start a new run with "
                         "its weights in another --workdir")


def load_model(m: ConfigDict, mesh: Mesh, seed: int = 0) -> tuple[Tokenizer, Transformer, Any]:
    """`(tokenizer, Transformer, params)` of `config.model`, parameters sharded over the mesh; new ones without a path.

    Raises the errors of `open_model` and `Checkpoints.restore`.
    """
    tokenizer, model, read = open_model(m)
    return tokenizer, model, read(mesh, seed)


def open_model(m: ConfigDict) -> tuple[Tokenizer, Transformer, Callable[[Mesh, int], Any]]:
    """`(tokenizer, Transformer, (mesh, seed) -> params)` of `config.model`: weights, which take minutes, are not read yet.

    From another run the weights are read, with its adapters merged in, and its tokenizer and chat template if `m` sets none.
    The seed is that of new weights. Raises ValueError for an unknown dtype, and the errors of `weights.opened`.
    """
    if m.dtype not in DTYPES:
        raise ValueError(f"model.dtype={m.dtype!r}; allowed: {', '.join(DTYPES)}")
    start = run_at(m.path)
    if start is not None:
        tokenizer, architecture, stored = _of_run(start, m)
    else:
        tokenizer, stored = tokenizers.load(m.tokenizer or m.path or "bytes", m.chat_template or None), None
        if m.path:
            architecture, read = weights.opened(m.path)
            stored = functools.partial(_of_files, read)
        else:
            architecture = model_config(m, tokenizer.vocab_size)
        tokenizer = tokenizer.with_variables(keywords(m.chat_template_kwargs)).limited_to(architecture.vocab_size)
    model = Transformer(architecture, DTYPES[m.dtype], m.remat, m.kernels, m.int8_cache)
    return tokenizer, model, stored or (lambda mesh, seed: _init(model, mesh)(jax.random.key(seed)))


def _of_files(read: Callable, mesh: Mesh, seed: int) -> Any:
    """The weights of an opened checkpoint, whatever the seed."""
    return read(np.float32, lambda shapes: parallel.tree_shardings(shapes, mesh))


@functools.lru_cache(maxsize=8)
def _init(model: Transformer, mesh: Mesh):
    """`model.init` with its parameters sharded over the mesh, compiled once for all runs of a process."""
    return jax.jit(model.init, out_shardings=parallel.tree_shardings(model.abstract_params(), mesh))


def _of_run(start: Start, m: ConfigDict) -> tuple[Tokenizer, ModelConfig, Callable[[Mesh, int], Any]]:
    """Tokenizer, architecture and, once they are read, the merged weights of a run, whatever the seed."""
    stored = stored_config(start.folder)
    stored.model.tokenizer = m.tokenizer or stored.model.tokenizer
    stored.model.chat_template = m.chat_template or stored.model.chat_template
    stored.model.chat_template_kwargs = m.chat_template_kwargs or stored.model.chat_template_kwargs
    tokenizer, model, weights_of = open_model(stored.model)

    def merged(mesh, seed):
        params = weights_of(mesh, stored.seed)
        target = {"params": described(params)}
        if stored.lora.rank:
            shapes = jax.eval_shape(lambda params: lora_lib.init(
                jax.random.key(0), params, rank=stored.lora.rank, alpha=stored.lora.alpha), params)
            target["lora"] = parallel.with_shardings(shapes, parallel.tree_shardings(shapes, mesh))
        del params  # frees memory for those of the checkpoint
        with Checkpoints(start.folder / start.store, read_only=True) as checkpoints:
            state = checkpoints.restore(target, start.step, part=True).state
        shardings = jax.tree.map(lambda x: x.sharding, target["params"])
        if "lora" not in state:
            return state["params"]
        return jax.jit(lora_lib.merge, out_shardings=shardings)(state["params"], state["lora"])

    return tokenizer, model.config, merged


def described(tree: Any) -> Any:
    """Shape, dtype and sharding of every array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def model_config(m: ConfigDict, vocab_size: int) -> ModelConfig:
    """A small Llama-style architecture from the sizes in `config.model`; with `experts`, a Mixtral-style one.

    With `sizes` it is that of a published model, vocabulary included.
    """
    if m.sizes:
        return MODELS[m.sizes]
    experts = None
    if m.experts:
        experts = Experts(m.experts, m.experts_per_token, m.expert_size or max(m.mlp_size // m.experts_per_token, 1))
    return ModelConfig(vocab_size=vocab_size, hidden_size=m.hidden_size, num_layers=m.num_layers, num_heads=m.num_heads,
                       num_kv_heads=m.num_heads, head_dim=m.hidden_size // m.num_heads,
                       mlp_size=m.mlp_size if experts is None else experts.size,  # as in a Mixtral's config
                       experts=experts, family="llama" if experts is None else "mixtral")


def tokenizer_source(m: ConfigDict) -> Path | None:
    """The directory whose tokenizer files an exported model gets; None if the tokenizer did not come from such files."""
    start = run_at("" if m.tokenizer else m.path)
    if start is not None:
        return tokenizer_source(stored_config(start.folder).model)
    name = m.tokenizer or m.path or "bytes"
    path = folder_of(expanded(name))
    directory = path.parent if path.name in FILES else path
    return directory if name != "bytes" and any((directory / file).is_file() for file in FILES) else None


def policy_of(config: ConfigDict, model: Transformer, mesh: Mesh) -> Policy:
    """The model at the temperature of sampling; greedy samples are scored at temperature 1."""
    return Policy(model, temperature=config.sampling.temperature or 1.0, mesh=mesh)

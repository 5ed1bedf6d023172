"""The model that is served, from a checkpoint or a run folder."""
import functools
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm import parallel, tokenizers
from jaxrl_llm.models import Transformer, weights
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import merge
from jaxrl_llm.setup.start import DTYPES
from jaxrl_llm.store.bucket import AnyPath
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.tools.registry import one_of


class LoadedPolicy(NamedTuple):
    """A model with its weights, its tokenizer and a name for the weights."""

    model: Transformer
    params: Any
    tokenizer: Tokenizer
    tag: str


def of_checkpoint(path: str, tokenizer: str = "", dtype: str = "float32", *, int8_cache: bool = False,
                  mesh: Mesh | None = None) -> LoadedPolicy:
    """A Hugging Face directory, a PEFT directory or a GGUF file; errors as in `weights.load` and `tokenizers.load`.

    `tokenizer`: used instead of the one beside the weights.  `int8_cache`: see `Transformer.int8_cache`.  `mesh`: see
    `weights_of`.
    """
    config, params = weights_of(path, mesh)
    model = Transformer(config, dtype=DTYPES[one_of("dtype", dtype, DTYPES)], int8_cache=int8_cache)
    return LoadedPolicy(model, params, tokenizers.load(tokenizer or path).limited_to(config.vocab_size), Path(path).name)


def weights_of(path: str | Path, mesh: Mesh | None) -> tuple[ModelConfig, Any]:
    """Architecture and weights of a checkpoint, of which each device of a mesh reads its pieces; None: all on one device."""
    return weights.load(path, shardings=None if mesh is None else functools.partial(parallel.rollout_shardings, mesh=mesh))


def of_run(workdir: AnyPath, step: int | None = None) -> LoadedPolicy:
    """A checkpoint of a run, the newest one or that of `step`, adapters merged in. Errors as in `trained.trained`."""
    from jaxrl_llm.runs.trained import trained
    restored = trained(workdir, step)
    params = restored.params if restored.lora is None else merge(restored.params, restored.lora)
    return LoadedPolicy(restored.policy.model, params, restored.source.stream.tokenizer, f"{workdir.name}-step-{restored.step}")


def slot_tokens_of(model: Transformer, wanted: int) -> int:
    """How many tokens a slot holds: `wanted`, or if 0 the model's context, at most 4096. ValueError beyond the context."""
    c = model.config
    limits = [scaling.longest_row for scaling in (c.rope_scaling, c.rope_local_scaling) if scaling and scaling.longest_row]
    most = min([c.max_positions, *limits])
    if wanted > most:
        raise ValueError(f"--slot_tokens={wanted}, but the model was made for {most}; give at most that")
    return wanted or min(most, 4096)

"""Weights of published models: Hugging Face directories and GGUF files in, Hugging Face directories out."""
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.weights import gguf, hf, layout, peft
from jaxrl_llm.models.weights.export import save_hf, save_peft
from jaxrl_llm.tools import files

__all__ = ["load", "opened", "save_hf", "save_peft"]


def load(path: str | Path, dtype: Any = jnp.float32, shardings: layout.Layout | None = None) -> tuple[ModelConfig, dict]:
    """Architecture and parameters of a checkpoint, for `Transformer(config)`.

    Args:
      path: a directory with `config.json` and safetensors (one file, or shards with their index), a `.gguf` file (the first, of
        several parts) or a directory that holds one; or a PEFT directory with a LoRA adapter, which is merged into its base.
      dtype: dtype of the parameters; float32 masters are what training wants, whatever the stored precision.
      shardings: maps the tree of shapes to the shardings of the parameters, so that each device gets only its shard; None:
        all parameters are on one device.
    Returns:
      `(ModelConfig, params)`; matrices are `[in, out]`, layers are stacked along the first axis.
    Raises the errors of `opened`.
    """
    checkpoint = opened(path)
    return checkpoint.config, checkpoint.params(dtype, shardings)


def opened(path: str | Path) -> layout.OpenCheckpoint:
    """The checkpoint at such a path before its weights are read.

    Raises:
      FileNotFoundError: the path does not exist or holds no model.
      ValueError: unsupported architecture or feature; missing tensor, unexpected shape, truncated file.
    """
    given, path = str(path), files.expanded(path)
    if path.is_dir():
        return _opened_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a directory with config.json and safetensors, "
                                f"or a .gguf file{_how_to_fetch(given)}")
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError(f"{path} is neither a directory with config.json and safetensors nor a .gguf file")
    return gguf.opened(path)


def _opened_directory(path: Path) -> layout.OpenCheckpoint:
    """A Hugging Face directory, one with a PEFT adapter, or one whose only model is a GGUF file."""
    if files.regular(path, "config.json"):
        return hf.opened(path)
    if (path / peft.CONFIG).exists():
        base = opened(peft.base_of(path))
        return base._replace(params=lambda dtype, shardings: peft.merge(path, base.config, base.params(dtype, shardings)))
    ggufs = sorted(path.glob("*.gguf"))
    firsts = [file for file in ggufs if not re.search(r"-\d{5}-of-\d{5}$", file.stem) or "-00001-of-" in file.stem]
    if len(firsts) > 1:
        raise ValueError(f"{path} holds {len(firsts)} models: {', '.join(file.name for file in firsts)}; name one of them")
    return gguf.opened(firsts[0]) if firsts and files.regular(path, firsts[0].name, limit=None) else hf.opened(path)


def _how_to_fetch(given: str) -> str:
    """What to do where the path looks like the name of a model on a hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return ""
    return (f". Nothing is downloaded here. If {given!r} is the name of a model on the Hugging Face hub: hf download {given} "
            f"--local-dir models/{given.partition('/')[2]}, then give that folder")

"""Weights of published models: Hugging Face directories and GGUF files in, Hugging Face directories out."""
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.weights import gguf, hf, layout
from jaxrl_llm.models.weights.export import save_hf

__all__ = ["load", "save_hf"]


def load(path: str | Path, dtype: Any = jnp.float32, shardings: layout.Layout | None = None) -> tuple[ModelConfig, dict]:
    """Architecture and parameters of a checkpoint, for `Transformer(config)`.

    Args:
      path: a directory with `config.json` and safetensors (one file, or shards with their index), or a `.gguf` file.
      dtype: dtype of the parameters; float32 masters are what training wants, whatever the stored precision.
      shardings: of a tree of shapes the tree of shardings that the parameters get, each device only its piece; None: all of
        them lie on one device.
    Returns:
      `(ModelConfig, params)`; matrices are `[in, out]`, layers are stacked along the first axis.
    Raises:
      FileNotFoundError: nothing there.
      ValueError: unsupported architecture or feature; missing tensor, unexpected shape, truncated file.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return hf.load(path, dtype, shardings)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a directory with config.json and safetensors, "
                                "or a .gguf file")
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a directory with config.json and safetensors nor a .gguf file")
    return gguf.load(path, dtype, shardings)

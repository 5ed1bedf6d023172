"""Reads LoRA adapters as the library PEFT saves them, and merges them into the weights they were trained on."""
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.weights import hf, layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {  # key -> values with which an adapter is `W + scale B A` and nothing else
    "peft_type": ("LORA",), "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []),
    "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "fan_in_fan_out": (None, False),
    "trainable_token_indices": (None,),
}
_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.[\w.]+)\.lora_([AB])\.weight")


def base_of(directory: Path) -> Path:
    """The directory of the model that an adapter belongs to. Raises FileNotFoundError where it is not on this machine."""
    name = hf.read_json(directory / CONFIG).get("base_model_name_or_path") or ""
    for path in (Path(name).expanduser(), directory / name):
        if name and path.exists() and not (path / CONFIG).exists():
            return path
    raise FileNotFoundError(f"{directory} holds a PEFT adapter of the model {name!r}, which is not on this machine; fetch it "
                            f"and write its folder into base_model_name_or_path of {directory / CONFIG}")


def adapters(directory: Path, config: ModelConfig) -> dict:
    """The adapter as our tree `{target: {"a": f32[L, in, r], "b": f32[L, r, out]}}`, its scale in `a`; 0 in layers without.

    Raises ValueError for adapters that do more than low-rank updates of the layers' matrices, naming the key.
    """
    described = hf.read_json(directory / CONFIG)
    for key, plain in _PLAIN.items():
        if described.get(key) not in plain:
            raise ValueError(f"{directory / CONFIG}: {key}={described[key]!r} is not supported; supported: {plain[-1]!r}")
    rank, file = described["r"], directory / WEIGHTS
    scale = described.get("lora_alpha", rank) / (rank**0.5 if described.get("use_rslora") else rank)
    if not file.exists():
        raise FileNotFoundError(f"{directory} holds {CONFIG} but no {WEIGHTS}; save the adapter with safetensors")
    targets = {place.hf.name.removesuffix(".weight"): place for place in layout.places(config)
               if place.path[-1] == "kernel" and place.path[1] in lora.TARGETS and place.hf.rows == place.shape[0]}
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in _tensors(file).items():
        match = _NAME.fullmatch(name)
        place = targets.get(match[1]) if match else None
        if match is None or place is None:
            raise ValueError(f"{file} holds the tensor {name!r}, which is no LoRA matrix of a layer of {config.family}; "
                             f"supported: adapters of {', '.join(lora.TARGETS)}")
        out, into = place.shape
        part, shape = ("a", (rank, into)) if match[3] == "A" else ("b", (out, rank))
        layout.check_shape(name, tensor.shape, shape, file)
        if part == "b" and place.hf.paired is not None:
            tensor = layout.halves_from_pairs(tensor, *place.hf.paired)
        stacked = pairs.setdefault(place.path[1], {"a": np.zeros((config.num_layers, into, rank), np.float32),
                                                   "b": np.zeros((config.num_layers, rank, out), np.float32)})
        stacked[part][place.layer] = tensor.T.astype(np.float32) * (scale if part == "a" else 1)
    return {target: {part: jnp.asarray(x) for part, x in pair.items()} for target, pair in pairs.items()}


def merge(directory: Path, config: ModelConfig, params: Any) -> Any:
    """The parameters with the adapter added into its matrices."""
    return lora.merge(params, adapters(directory, config))


def _tensors(file: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(file)

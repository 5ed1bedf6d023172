"""Reads LoRA adapters as the library PEFT saves them, and merges them into the weights they were trained on."""
import math
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import re2

from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.weights import hf, layout
from jaxrl_llm.tools import files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of PEFT's LoraConfig. Each field that is in none of these tables changes the update, and has to be off.
_COMPUTED = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_WITHOUT_EFFECT = (  # on trained tensors: names, training, choice of layers, settings of a feature that another field has
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying")
_ALLOWED = {"peft_type": ("LORA",), "bias": ("none",),
            "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica")}  # those that leave the base unchanged
_HINTS = {"init_lora_weights": "; such an adapter changed its base; PEFT's save_pretrained makes a plain one of it, with "
                               "path_initial_model_for_weight_conversion"}
_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.[\w.]+)\.lora_([AB])\.weight")


def is_adapter(directory: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").exists()


def base_of(directory: Path) -> Path:
    """The model that an adapter belongs to, a folder or a GGUF file.

    Raises FileNotFoundError where it is not on this machine, ValueError where it is itself an adapter, or no text.
    """
    file = directory / CONFIG
    name = files.typed(hf.read_json(file), "base_model_name_or_path", str, file, "a text") or ""
    for path in (files.expanded(name), directory / name):
        if name and os.path.exists(path) and not path.samefile(directory):
            if is_adapter(path):
                raise ValueError(f"{directory} holds a PEFT adapter of {name!r}, which is an adapter itself; merge that one "
                                 f"into its base and write the folder of the result into base_model_name_or_path of "
                                 f"{directory / CONFIG}")
            return path
    raise FileNotFoundError(f"{directory} holds a PEFT adapter of the model {name!r}, which is not on this machine; fetch it "
                            f"and write its folder into base_model_name_or_path of {directory / CONFIG}")


def adapters(directory: Path, config: ModelConfig) -> lora.Adapters:
    """The adapter, with its scale in `a`; 0 in layers without one, and beyond the rank of a layer that has a smaller one.

    Raises ValueError for adapters that do more than low-rank updates of the layers' matrices, naming the key.
    """
    described, file = hf.read_json(directory / CONFIG), files.regular(directory, WEIGHTS, limit=None)
    _check(described, directory / CONFIG)
    if file is None:
        raise FileNotFoundError(f"{directory} holds {CONFIG} but no {WEIGHTS}; save the adapter with safetensors")
    targets = {place.hf.name.removesuffix(".weight"): place for place in layout.places(config)
               if place.path[-1] == "kernel" and place.path[1] in lora.TARGETS and place.hf.rows == place.shape[0]}
    pairs: dict[layout.StoredTensor, dict[str, np.ndarray]] = {}
    tensors = hf.safetensors_of(file)
    for name in tensors.keys():
        tensor, match = tensors.get_tensor(name), _NAME.fullmatch(name)
        place = targets.get(match[1]) if match else None
        if match is None or place is None:
            raise ValueError(f"{file} holds the tensor {name!r}, which is no LoRA matrix of a layer of {config.family}; "
                             f"supported: adapters of {', '.join(lora.TARGETS)}")
        rank, scale = _rank_and_scale(described, match[1], directory / CONFIG)
        out, into = place.shape
        part, shape = ("a", (rank, into)) if match[3] == "A" else ("b", (out, rank))
        layout.check_shape(name, tensor.shape, shape, file)
        if part == "b" and place.hf.paired is not None:
            tensor = layout.halves_from_pairs(tensor, *place.hf.paired)
        with np.errstate(over="ignore"):  # which the next line refuses
            scaled = tensor.T.astype(np.float32) * np.float32(scale if part == "a" else 1)
        pairs.setdefault(place, {})[part] = layout.finite(name, scaled, file)
    return _stacked(pairs, config.num_layers, file)


def _check(described: dict[str, Any], file: Path) -> None:
    """Raises ValueError for a field with a value that changes more than the tensors say."""
    for key, value in ({"peft_type": None} | described).items():
        if key in _ALLOWED:
            allowed = _ALLOWED[key]
            fine = str(value).lower() in [str(one).lower() for one in allowed] or value is None and key != "peft_type"
        else:
            allowed, fine = (False,), key in _COMPUTED + _WITHOUT_EFFECT or not value
        if not fine:
            raise ValueError(f"{file}: {key}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}"
                             f"{_HINTS.get(key, '')}")


def _rank_and_scale(described: dict[str, Any], module: str, file: Path) -> tuple[int, float]:
    """Of one matrix: the first pattern that matches the end of its name, else the value for all, as in PEFT.

    RE2 runs the patterns, in linear time. Raises ValueError for patterns and numbers that are none.
    """
    def chosen(key, whole):
        patterns = files.typed(described, f"{key}_pattern", dict, file, "an object of patterns and numbers") or {}
        try:
            return next((value for one, value in patterns.items() if re2.match(rf"(.*\.)?({one})$", module)), whole)
        except re2.error as error:
            raise ValueError(f"{file}: {key}_pattern={patterns!r} holds a pattern that RE2 cannot read ({error})") from error

    rank, alpha = chosen("rank", described.get("r", 8)), chosen("alpha", described.get("lora_alpha", 8))
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"{file} gives {module} the rank {rank!r} and lora_alpha {alpha!r}; expected a whole number from 1 on "
                         "and a finite number")
    return rank, alpha / (rank**0.5 if described.get("use_rslora") else rank)


def _stacked(pairs: dict[layout.StoredTensor, dict[str, np.ndarray]], layers: int, file: Path) -> lora.Adapters:
    """The pairs of all layers as a tree; ValueError for a matrix without its other half."""
    tree = lora.Adapters({}, 1.0)
    for place, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{file} holds one of the two LoRA matrices of {place.hf.name} alone; save the adapter again")
        target, (out, into) = place.path[1], place.shape
        rank = max(other["a"].shape[1] for one, other in pairs.items() if one.path[1] == target and "a" in other)
        stack = tree.setdefault(target, {"a": np.zeros((layers, into, rank), np.float32),
                                         "b": np.zeros((layers, rank, out), np.float32)})
        own = pair["a"].shape[1]
        stack["a"][place.layer, :, :own], stack["b"][place.layer, :own] = pair["a"], pair["b"]
    return lora.Adapters({target: {part: jnp.asarray(x) for part, x in stack.items()} for target, stack in tree.items()}, 1.0)


def merge(directory: Path, config: ModelConfig, params: Any) -> Any:
    """The parameters with the adapter added into its matrices. Raises ValueError where float32 has no number for one."""
    read = adapters(directory, config)
    merged = lora.merge(params, read)
    for target in read:
        if not jnp.isfinite(merged["layers"][target]["kernel"]).all():
            raise ValueError(f"{directory / WEIGHTS}: with this adapter, and lora_alpha in {CONFIG}, matrices of {target} hold "
                             "NaN or infinite values; fetch it again, or take another")
    return merged

"""Writes Hugging Face directories that transformers, vLLM and `weights.load` read."""
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import Adapters
from jaxrl_llm.models.weights import config_json, layout
from jaxrl_llm.tools import files

_GENERATION = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "chat_template*", "additional_chat_templates/*.jinja", _GENERATION)


def save_hf(directory: str | Path, config: ModelConfig, params: Any, tokenizer_files_from: str | Path | None = None,
            shard_bytes: int = 5_000_000_000, stop_ids: Sequence[int] = ()) -> None:
    """Writes `config.json` and safetensors, in the parameters' own dtype; `weights.load` gives back the same bits.

    Args:
      directory: made if absent; weights of an earlier save there are replaced.
      config, params: the model; merge adapters first (`models.lora.merge`).
      tokenizer_files_from: directory whose tokenizer files and special token ids are copied.
      shard_bytes: weights above this many bytes are split into shards with an index.
      stop_ids: all tokens that end a completion, written into config.json and generation_config.json beside what the latter
        has; empty: those of the copied files.
    Raises ValueError: the config has a feature that its family's format cannot state; parameters do not fit the config;
    `tokenizer_files_from` holds no tokenizer.
    """
    directory, source = Path(directory), None if tokenizer_files_from is None else Path(tokenizer_files_from)
    described = config_json.written(config) | {"torch_dtype": str(params["embed"].dtype)}
    copied = [] if source is None else [file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)
                                        if files.regular(source, file.relative_to(source))]
    if source is not None and not copied:
        raise ValueError(f"{source} holds no tokenizer files ({', '.join(_TOKENIZER_FILES)})")
    if source is not None:
        original = files.read_object(source, "config.json") or {}
        described |= {key: original.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("model*.safetensors"), directory / "model.safetensors.index.json"):
        old.unlink(missing_ok=True)
    _write_weights(directory, config, params, shard_bytes)
    for file in copied:
        target = directory / file.relative_to(source)
        if target.resolve() != file.resolve():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(file, target)
    if stop_ids:
        described["eos_token_id"] = _ids(stop_ids)
        generation = (files.read_object(source or directory, _GENERATION) or {}) | {"eos_token_id": _ids(stop_ids)}
        (directory / _GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _ids(stop_ids: Sequence[int]) -> int | list[int]:
    """An id alone stands without a list, as most readers know it."""
    return stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)


def save_peft(directory: str | Path, config: ModelConfig, lora: Adapters, base: str) -> None:
    """Writes adapters as PEFT and vLLM read them, `adapter_model.safetensors` and `adapter_config.json`, without base weights.

    `base` names the model that they belong to. Raises ValueError for a family whose files keep an adapted matrix together
    with others.
    """
    directory, tensors, targets = Path(directory), {}, set()
    for place in layout.places(config):
        adapter = lora.get(place.path[1]) if place.transposed and place.layer is not None else None
        if adapter is None:
            continue
        if place.hf.rows != place.shape[0]:
            raise ValueError(f"{place.hf.name} of family {config.family!r} holds several matrices, and PEFT adapts it as one; "
                             "export the merged model instead")
        module = place.hf.name.removesuffix(".weight")
        targets.add(module.rsplit(".", 1)[1])
        a, b = np.asarray(adapter["a"][place.layer]).T, np.asarray(adapter["b"][place.layer]).T
        b = b if place.hf.paired is None else layout.pairs_from_halves(b, *place.hf.paired)
        for name, matrix in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{module}.{name}.weight"] = np.ascontiguousarray(matrix)
    rank = next(iter(lora.values()))["a"].shape[-1]
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
                 "lora_alpha": rank * lora.scale,
                 "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
                 "target_modules": sorted(targets)}
    directory.mkdir(parents=True, exist_ok=True)
    _save(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Writes a safetensors file with the permissions that the umask gives, not only the owner's."""
    from safetensors.numpy import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, {"format": "pt"})
    file.chmod(mode)


def _write_weights(directory, config, params, shard_bytes):
    leaves, stored = {}, {}  # path -> parameter; name of a tensor -> places in it
    for place in layout.places(config):
        leaf = params
        for key in place.path:
            if key not in leaf:
                raise ValueError(f"parameter {'/'.join(place.path)} is missing from params")
            leaf = leaf[key]
        layers = () if place.layer is None else (config.num_layers,)
        layers += () if place.expert is None else (config.experts.count,)
        expected = layers + place.shape[::-1 if place.transposed else 1]
        layout.check_shape("/".join(place.path), leaf.shape, expected, "params")
        leaves[place.path] = leaf
        stored.setdefault(place.hf.name, []).append(place)
    size = {name: sum(math.prod(p.shape) * leaves[p.path].dtype.itemsize for p in places) for name, places in stored.items()}
    shards = [[]]
    for name in stored:
        if shards[-1] and sum(map(size.get, shards[-1])) + size[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    index = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= dict.fromkeys(shard, file)
        _save({name: _tensor(leaves, stored[name]) for name in shard}, directory / file)
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(size.values())}, "weight_map": index}, indent=2)
        (directory / "model.safetensors.index.json").write_text(text + "\n")


def _tensor(leaves, places):
    """The stored tensor that holds `places` one after another."""
    parts = []
    for place in sorted(places, key=lambda place: place.hf.start):
        index = tuple(number for number in (place.layer, place.expert) if number is not None)
        part = np.asarray(leaves[place.path][index])
        part = part.T if place.transposed else part
        parts.append(part if place.hf.paired is None else layout.pairs_from_halves(part, *place.hf.paired))
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))

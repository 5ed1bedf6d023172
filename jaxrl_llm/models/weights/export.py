"""Writes Hugging Face directories that transformers, vLLM and `weights.load` read."""
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.weights import experts, hf, layout

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "gemma3_text": "Gemma3ForCausalLM", **{name: family.architecture for name, family in experts.FAMILIES.items()}}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json")


def save_hf(directory: str | Path, config: ModelConfig, params: Any, tokenizer_files_from: str | Path | None = None,
            shard_bytes: int = 5_000_000_000) -> None:
    """Writes `config.json` and safetensors, in the parameters' own dtype; `weights.load` gives back the same bits.

    Args:
      directory: made if absent; weights of an earlier save there are replaced.
      config, params: the model; merge adapters first (`models.lora.merge`).
      tokenizer_files_from: directory whose tokenizer files and special token ids are copied.
      shard_bytes: weights above this many bytes are split into shards with an index.
    Raises:
      ValueError: the config has a feature that its family's format cannot say; parameters do not fit the config;
        `tokenizer_files_from` holds no tokenizer.
    """
    directory, source = Path(directory), None if tokenizer_files_from is None else Path(tokenizer_files_from)
    described = config_json(config) | {"torch_dtype": str(params["embed"].dtype)}
    copied = [] if source is None else [file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)]
    if source is not None and not copied:
        raise ValueError(f"{source} holds no tokenizer files ({', '.join(_TOKENIZER_FILES)})")
    if source is not None and (source / "config.json").exists():
        original = json.loads((source / "config.json").read_text())
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
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def config_json(config: ModelConfig) -> dict:
    """The contents of `config.json`, with keys that older and current readers know."""
    c = config
    if c.family not in _CLASSES:
        raise ValueError(f"family {c.family!r} has no export format; supported: {', '.join(_CLASSES)}")
    gemma, scaling = c.family == "gemma3_text", c.rope_scaling
    activation = next(theirs for theirs, ours in hf.ACTIVATIONS.items() if ours == c.activation)
    described = dict(
        architectures=[_CLASSES[c.family]], model_type=c.family, vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, intermediate_size=c.mlp_size, max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings, rope_theta=c.rope_theta, rope_scaling=None,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    described["hidden_activation" if gemma else "hidden_act"] = activation
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= dict(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor,
                         original_max_position_embeddings=scaling.original_max_positions)
        described["rope_scaling"] = rope
    if gemma or any(c.local_layers):
        described |= dict(sliding_window=c.window, use_sliding_window=True, layer_types=[
            "sliding_attention" if local else "full_attention" for local in c.local_layers])
    if gemma:
        described |= dict(rope_local_base_freq=c.rope_local_theta, query_pre_attn_scalar=round(c.attention_scale**-2))
    described |= experts.to_json(c)
    _check_says_all(described, config)
    return described


def _check_says_all(described, config):
    """The description must give back the very config: a feature outside its family would be lost in silence."""
    back = hf.config_from(described)
    lost = [f"{field.name}={getattr(config, field.name)!r}" for field in dataclasses.fields(ModelConfig)
            if getattr(config, field.name) != getattr(back, field.name)]
    if lost:
        raise ValueError(f"the format of family {config.family!r} cannot say {', '.join(lost)}; choose the family "
                         "whose architecture this is")


def _write_weights(directory, config, params, shard_bytes):
    from safetensors.numpy import save_file

    leaves, sizes, shards = {}, {}, [[]]
    for place in layout.places(config):
        leaf = params
        for key in place.path:
            if key not in leaf:
                raise ValueError(f"parameter {'/'.join(place.path)} is missing from params")
            leaf = leaf[key]
        layers = () if place.layer is None else (config.num_layers,)
        layers += () if place.expert is None else (leaf.shape[1],)
        expected = layers + place.shape[::-1 if place.transposed else 1]
        layout.check_shape("/".join(place.path), leaf.shape, expected, "params")
        leaves[place.path], sizes[place.hf] = leaf, math.prod(place.shape) * leaf.dtype.itemsize
        if shards[-1] and sum(sizes[p.hf] for p in shards[-1]) + sizes[place.hf] > shard_bytes:
            shards.append([])
        shards[-1].append(place)
    index = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= {place.hf: name for place in shard}
        save_file({place.hf: _stored(leaves[place.path], place) for place in shard}, directory / name, {"format": "pt"})
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2)
        (directory / "model.safetensors.index.json").write_text(text + "\n")


def _stored(leaf, place):
    index = tuple(number for number in (place.layer, place.expert) if number is not None)
    tensor = np.asarray(leaf[index])
    return np.ascontiguousarray(tensor.T if place.transposed else tensor)

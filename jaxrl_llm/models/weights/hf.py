"""Reads Hugging Face directories: `config.json` and safetensors, in one file or in shards with their index."""
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.weights import experts, layout

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", *experts.FAMILIES)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # their name -> ours
_OFF = (None, False)
_NOT_SUPPORTED_UNLESS = {  # key -> values with which the architecture is the plain one
    "attention_bias": _OFF, "mlp_bias": _OFF, "use_bidirectional_attention": _OFF, "final_logit_softcapping": _OFF,
    "attn_logit_softcapping": _OFF, "quantization_config": _OFF, "partial_rotary_factor": (None, 1.0),
    "clip_qkv": _OFF,
}
_GEMMA3_DEFAULTS: dict[str, Any] = {  # the published configs of this family leave out what equals these
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers takes for keys that a config does not have
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    "gemma3_text": _GEMMA3_DEFAULTS,
}
_PLAIN_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rope_theta": 1e4, "rms_norm_eps": 1e-6}
_WINDOW_KEYS = ("qwen2", "qwen3")  # families whose models read `use_sliding_window`
_STORED = ("F64", "F32", "F16", "BF16")  # dtypes whose numbers are the weights themselves
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)(vision_tower|multi_modal_projector)\.")


def load(directory: Path, dtype: Any = jnp.float32, shardings: layout.Layout | None = None) -> tuple[ModelConfig, dict]:
    """`(ModelConfig, params)` of a directory with `config.json` and safetensors; see `layout.assemble`."""
    config_file = directory / "config.json"
    if not config_file.exists():
        raise FileNotFoundError(f"{directory} has no config.json; give a directory with config.json and safetensors")
    config = config_from(read_json(config_file), config_file)
    tensors = _Tensors(directory)
    prefix = tensors.prefix()
    wanted = {_stored_name(prefix, place.hf) for place in layout.places(config)}
    wanted.add(_stored_name(prefix, "lm_head.weight"))  # some files repeat the tied embedding
    layout.check_nothing_left({name for name in tensors.file_of if not _IGNORED.search(name)} - wanted, directory)
    tensors.check_dtypes(wanted)
    config = _as_stored(config, tensors, prefix, config_file)

    def read(place, index):
        name = _stored_name(prefix, place.hf)
        tensor = tensors.find(name)
        layout.check_shape(name, tensor.get_shape(), place.shape, tensors.file_of[name])
        return tensor[index]

    return config, layout.assemble(config, read, dtype, shardings)


def read_json(file: Path) -> dict:
    """The object in a JSON file; ValueError with its name where it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # also for what is not UTF-8
        raise ValueError(f"{file} is no JSON file ({error}); if its download was cut short, fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, expected a JSON object")
    return found


def _as_stored(config, tensors, prefix, file):
    """The config with its embedding untied where the files hold an unembedding of other values, as transformers does it."""
    name, embedding = _stored_name(prefix, "lm_head.weight"), _stored_name(prefix, "model.embed_tokens.weight")
    if not config.tie_embeddings or name not in tensors.file_of:
        return config
    pair = tensors.find(name), tensors.find(embedding)
    size, rows = pair[0].get_shape(), 1 << 14
    same = size == pair[1].get_shape() and all(
        np.array_equal(*(one[i:min(i + rows, size[0])] for one in pair)) for i in range(0, size[0], rows))
    if same:
        return config
    warnings.warn(f"{file}: tie_word_embeddings is true, but {tensors.file_of[name]} holds an unembedding {name!r} of other "
                  "values than the embedding; it is used, and the two are not tied", stacklevel=4)
    return dataclasses.replace(config, tie_embeddings=False)


def _stored_name(prefix, name):
    """Name of a tensor in files that call the embedding `{prefix}embed_tokens.weight`."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight" if prefix == "language_model.model." else name
    return prefix + name.removeprefix("model.")


class _Tensors:
    """The named tensors of a directory's safetensors files, of which parts are read when they are asked for."""

    def __init__(self, directory: Path):
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        self.directory, self._open = directory, {}
        if single.exists():
            self.file_of = {name: single for name in self._opened(single).keys()}
        elif index.exists():
            self.file_of = {k: directory / v for k, v in read_json(index).get("weight_map", {}).items()}
        else:
            raise FileNotFoundError(f"{directory} has neither model.safetensors nor model.safetensors.index.json"
                                    + _other_formats(directory))

    def _opened(self, file):
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            if not file.exists():
                raise FileNotFoundError(f"{file} is named by the index but is not there; fetch the checkpoint again")
            try:
                self._open[file] = safe_open(file, "numpy")
            except SafetensorError as error:
                raise ValueError(f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file ({error}); "
                                 "if its download was cut short, fetch it again") from error
        return self._open[file]

    def prefix(self) -> str:
        """What stands before `embed_tokens`: `model.`, nothing, or the text part of a multimodal model."""
        for name in self.file_of:
            if name.endswith("embed_tokens.weight"):
                return name.removesuffix("embed_tokens.weight")
        raise ValueError(f"tensor 'model.embed_tokens.weight' is missing from {self.directory}, "
                         f"which holds {len(self.file_of)} tensors")

    def check_dtypes(self, names) -> None:
        """Raises ValueError for tensors that hold codes and no weights."""
        for name in sorted(self.file_of.keys() & names):
            dtype = self.find(name).get_dtype()
            if dtype not in _STORED:
                raise ValueError(f"tensor {name!r} in {self.file_of[name]} has dtype {dtype}: quantised codes, without the "
                                 f"scale that makes weights of them; supported: {', '.join(_STORED)}. Fetch the checkpoint "
                                 "in bfloat16, or as a GGUF file")

    def find(self, name):
        """A tensor of which parts can be read."""
        if name not in self.file_of or name not in self._opened(self.file_of[name]).keys():
            raise ValueError(f"tensor {name!r} is missing from {self.file_of.get(name, self.directory)}; "
                             f"{self.directory} holds {len(self.file_of)} tensors")
        return self._opened(self.file_of[name]).get_slice(name)


def _other_formats(directory: Path) -> str:
    """What to do about weights in a format that is not read; empty where there are none."""
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in directory.glob(pattern))
    if not pickled:
        return ""
    return (f"; {pickled[0]} is a pickle file, which runs code when it is read. Where you trust it, convert it: python -c "
            f"\"import transformers as t; t.AutoModelForCausalLM.from_pretrained('{directory}', "
            f"dtype='auto').save_pretrained('{directory}')\"")


def config_from(raw: dict, file: Any = "config.json") -> ModelConfig:
    """`ModelConfig` from the contents of a `config.json`, in the form of current or of older transformers releases."""
    if raw.get("model_type") == "gemma3":  # the text part of the multimodal model
        outer = {key: raw[key] for key in ("quantization_config",) if key in raw}
        raw = outer | raw["text_config"] | {"model_type": "gemma3_text"}
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    gemma = family == "gemma3_text"
    mixture = experts.FAMILIES.get(family)
    defaults = {**_PLAIN_DEFAULTS, **(mixture.defaults if mixture else _DEFAULTS[family])}
    raw = defaults | {key: value for key, value in raw.items() if value is not None}
    for key, plain in _NOT_SUPPORTED_UNLESS.items():
        if raw.get(key) not in plain:
            raise ValueError(f"{file}: {key}={raw[key]!r} is not supported for {family}; supported: {plain[-1]!r}")
    stated = raw["hidden_activation" if gemma else "hidden_act"]
    if stated not in ACTIVATIONS:
        raise ValueError(f"{file}: activation {stated!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    need = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    if absent := [key for key in need if key not in raw]:
        raise ValueError(f"{file}: {', '.join(absent)} missing")
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    shape = dict(
        vocab_size=raw["vocab_size"], hidden_size=hidden_size, num_layers=raw["num_hidden_layers"], num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads", num_heads), head_dim=raw.get("head_dim", hidden_size // num_heads),
        mlp_size=raw["intermediate_size"], max_positions=raw["max_position_embeddings"],
        activation=ACTIVATIONS[stated],
        norm_eps=raw["rms_norm_eps"], tie_embeddings=raw.get("tie_word_embeddings", False), family=family,
        qkv_bias=family == "qwen2", qk_norm=family in ("qwen3", "gemma3_text"), experts=experts.from_json(raw, file))
    if mixture is not None:
        shape |= dict(qkv_bias=mixture.qkv_bias and raw.get("qkv_bias", True), qk_norm=mixture.qk_norm,
                      qk_norm_wide=mixture.qk_norm_wide)
    if gemma:
        shape |= dict(norm_offset=1.0, post_norms=True, embedding_scale=hidden_size**0.5,
                      attention_scale=raw["query_pre_attn_scalar"] ** -0.5)
    local = _local_layers(raw, file)
    return ModelConfig(**shape, **_rope(raw, any(local), file), local_layers=local,
                       window=raw.get("sliding_window") if any(local) else None)


def _local_layers(raw, file) -> tuple[bool, ...]:
    """Which layers have a sliding window: `layer_types`, or the rules of configs that are older than that key."""
    layers = raw["num_hidden_layers"]
    if "layer_types" in raw:
        known = {"full_attention"} | ({"sliding_attention"} if raw["model_type"] != "llama" else set())
        if other := set(raw["layer_types"]) - known:
            raise ValueError(f"{file}: layer_types {', '.join(sorted(other))} not supported for {raw['model_type']}; "
                             f"supported: {', '.join(sorted(known))}")
        return tuple(kind == "sliding_attention" for kind in raw["layer_types"])
    if raw["model_type"] in experts.FAMILIES:
        return experts.local_layers(raw, file)
    if raw["model_type"] == "gemma3_text":
        return tuple((i + 1) % raw["sliding_window_pattern"] != 0 for i in range(layers))
    has_window = raw["model_type"] in _WINDOW_KEYS and raw.get("use_sliding_window")
    first = raw.get("max_window_layers", layers) if has_window else layers
    return tuple(i >= first for i in range(layers))


def _rope(raw, any_local, file) -> dict:
    """Rotary fields of `ModelConfig` from `rope_parameters` (one set, or one per layer type) or the older keys."""
    parameters = raw.get("rope_parameters") or {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full, local = parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}
    else:
        full = parameters or raw.get("rope_scaling") or {}
        local = {} if raw["model_type"] == "gemma3_text" else full
    theta = float(full.get("rope_theta", raw["rope_theta"]))
    scaling = _rope_scaling(full, file)
    if not any_local:
        return dict(rope_theta=theta, rope_scaling=scaling)
    if _rope_scaling(local, file):
        raise ValueError(f"{file}: rope scaling of sliding-window layers is not supported; "
                         "supported: on full attention")
    local_theta = float(local.get("rope_theta", raw.get("rope_local_base_freq", theta)))
    return dict(rope_theta=theta, rope_scaling=scaling, rope_local_theta=local_theta)


def _rope_scaling(parameters, file) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file}: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported; "
                         "supported: 1.0")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(parameters["factor"]))
    if kind == "llama3":
        return RopeScaling("llama3", float(parameters["factor"]), float(parameters["low_freq_factor"]),
                           float(parameters["high_freq_factor"]), parameters["original_max_position_embeddings"])
    raise ValueError(f"{file}: rope type {kind!r} is not supported; supported: 'default', 'linear', 'llama3'")

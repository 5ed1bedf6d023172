"""Reads GGUF files: shape of the model from the metadata, weights dequantised tensor by tensor."""
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_llm.models import families
from jaxrl_llm.models.attention import rotary_frequencies
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.weights import config_checks, layout
from jaxrl_llm.models.weights.config_json import of_family
from jaxrl_llm.tools import files, gguf_header

_KEYS = {  # metadata keys without their architecture -> keys of config.json
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "rope.freq_base": "rope_theta",
}
_REQUIRED = tuple(_KEYS)[:6]
_PLAIN_YARN = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
               "rope.scaling.yarn_log_multiplier": 0.0}
_BIASES = {"attention_bias": "attn_q", "qkv_bias": "attn_q", "mlp_bias": "ffn_up"}  # key -> the tensor that shows it
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # divisors of rotary frequencies


def opened(path: Path) -> layout.OpenCheckpoint:
    """A GGUF file of an architecture that one of `models.families` names, with its tensors checked."""
    parts = _readers(path)
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    metadata = {name: value for name, value in gguf_header.contents(parts[0], path).items()
                if not name.startswith("tokenizer.")}
    shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in tensors.items()}

    def read_stored(name):
        return _dequantized(tensors[name], path)

    factors = {name: read_stored(name) for name in _FACTORS if name in tensors}
    config = config_from(metadata, shapes, path, factors)
    if "rope_freqs.weight" in tensors:
        config = _with_llama3_scaling(config, factors["rope_freqs.weight"], path)
    layout.check_count(config, sum(map(math.prod, shapes.values())), "numbers", path)
    places = list(layout.places(config))
    layout.check_nothing_left(tensors.keys() - {place.gguf.name for place in places} - {*_FACTORS}, path)
    for place in places:
        if place.gguf.name not in tensors:
            raise ValueError(f"tensor {place.gguf.name!r} is missing from {path}, which holds {len(tensors)} tensors")
        many = () if place.expert is None else (config.experts.count,)  # those of a layer are one tensor
        layout.check_shape(place.gguf.name, as_matrix(place, shapes[place.gguf.name]), many + place.shape_of(place.gguf), path)

    @functools.lru_cache(maxsize=config.num_layers)  # the tensors of one parameter: each device in turn asks for its shard
    def whole(name):
        return read_stored(name)

    def read(place, index):
        tensor = whole(place.gguf.name)
        tensor = tensor.reshape(as_matrix(place, tensor.shape)) if place.expert is None else tensor[place.expert]
        part = place.gguf.read(tensor, place.shape[0], index)
        return part - config.norm_offset if place.path[-1] == "scale" else part  # stored with the offset included

    return layout.OpenCheckpoint(config, functools.partial(layout.assemble, config, read))


def as_matrix(place: layout.StoredTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a stored tensor; a matrix of one row is stored as a vector."""
    return (1, *shape) if place.transposed and len(shape) == 1 else shape


def _readers(path: Path) -> list:
    """A reader of the file and, if it is the first of several parts, of the others; ValueError if one is absent."""
    first = gguf_header.reader(path)
    split = gguf_header.contents(first, path)
    count, number = (files.typed(split, f"split.{key}", int, path, "a whole number") or 0 for key in ("count", "no"))
    if count < 2:
        return [first]
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})", path.stem)
    if named is None or int(named[3]) != count:
        raise ValueError(f"{path} is part {number + 1} of {count}; name the parts NAME-00001-of-{count:05d}.gguf and so on, as "
                         "they were published")
    others = [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if absent := [file.name for file in others if files.regular(path.parent, file.name, limit=None) is None]:
        raise FileNotFoundError(f"{path} is part {number + 1} of {count}, and {', '.join(absent)} is not beside it; fetch all "
                                "parts")
    if number != 0:
        raise ValueError(f"{path} is part {number + 1} of {count}; give the first, {others[0].name}, which has the metadata")
    return [first, *map(gguf_header.reader, others[1:])]


def _dequantized(tensor: Any, path: Path) -> np.ndarray:
    """The numbers of a stored tensor. Raises ValueError for a kind that the library does not compute, and for NaN."""
    from gguf.quants import dequantize

    try:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(f"tensor {tensor.name!r} in {path} is of type {tensor.tensor_type.name}, which is not read "
                         f"({error})") from error
    return layout.finite(tensor.name, values, path)


def config_from(metadata: dict, shapes: dict[str, tuple[int, ...]], file: Any, factors: Mapping = MappingProxyType({}),
                ) -> ModelConfig:
    """`ModelConfig` from GGUF metadata and tensor shapes, which show vocabulary size, tied embeddings and biases.

    `factors`: the tensors of `_FACTORS` that the file has.
    """
    files.typed(metadata, "general.architecture", str, file, "a text")
    family = families.of_gguf(metadata, file)
    own = {name.removeprefix(f"{family.gguf.architecture}."): value for name, value in metadata.items()}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"tensor 'token_embd.weight' is missing from {file}, which holds {len(shapes)} tensors")
    partly = "partial_rotary_factor" in family.stated()
    if "attention.key_length" not in own and "rope.dimension_count" in own and not partly:
        own["attention.key_length"] = own["rope.dimension_count"]
    keys = _KEYS | family.gguf.keys
    raw = {theirs: _shared(own[key], f"{family.gguf.architecture}.{key}", file) for key, theirs in keys.items() if key in own}
    needed = (*_REQUIRED, *family.gguf.required, *(family.mixture.gguf_required if family.mixture is not None else ()))
    if absent := [key for key in needed if key not in own]:
        raise ValueError(f"{file}: metadata key '{family.gguf.architecture}.{absent[0]}' is missing")
    raw |= {"model_type": family.name, "vocab_size": shapes["token_embd.weight"][0],
            "tie_word_embeddings": "output.weight" not in shapes,
            "rope_scaling": _scaling(own, factors, family.gguf.architecture, file)}
    raw |= {key: f"blk.0.{name}.bias" in shapes for key, name in _BIASES.items() if key in family.stated()}
    config_checks.check(raw, raw.keys() & config_checks.KEYS.keys(), file)
    for key in ("attention.value_length", "rope.dimension_count"):
        files.typed(own, key, int, file, "a whole number")
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    if (head_dim := own.get("attention.value_length", raw["head_dim"])) != raw["head_dim"]:
        raise ValueError(f"{file}: {family.gguf.architecture}.attention.value_length={head_dim} is not supported; supported: "
                         f"the head dimension, {raw['head_dim']}")
    rotated = own.get("rope.dimension_count", raw["head_dim"])
    if rotated != raw["head_dim"] and not partly:
        raise ValueError(f"{file}: {family.gguf.architecture}.rope.dimension_count={rotated} is not supported; supported: the "
                         f"head dimension, {raw['head_dim']}")
    raw["partial_rotary_factor"] = rotated / raw["head_dim"]
    if family.mixture is not None:
        raw |= family.mixture.in_gguf(own, raw)
    return of_family(family, raw | family.gguf.derived(own, raw), file)


def _shared(value, key, file):
    """One value that all layers share."""
    if isinstance(value, list):
        raise ValueError(f"{file}: '{key}' differs between layers ({value}); supported: one value for all")
    return value


def _scaling(own, factors, architecture, file) -> dict | None:
    """The rope scaling as in a `config.json`; a factor without a type means `linear`."""
    if "rope_factors_short.weight" in factors:
        short, long = (factors[name].tolist() for name in _FACTORS[1:])
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long,
                "attention_factor": own.get("rope.scaling.attn_factor")}
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    kind = own.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file}: {architecture}.rope.scaling.type={kind!r} is not supported; supported: 'none', 'linear', "
                         "'yarn', or divisors in the tensor 'rope_freqs.weight'")
    if factor is None:
        raise ValueError(f"{file}: metadata key '{architecture}.rope.scaling.factor' is missing")
    for key, plain in _PLAIN_YARN.items():
        if own.get(key, plain) != plain:
            raise ValueError(f"{file}: {architecture}.{key}={own[key]} is not supported; supported: {plain}")
    scaling = {"rope_type": kind, "factor": factor, "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
               "beta_slow": own.get("rope.scaling.yarn_beta_slow")}
    original = own.get("rope.scaling.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _with_llama3_scaling(config, divisors, file):
    """Llama 3.1 and later store only each frequency's divisor: take the published ramp and check that it fits."""
    scaling = RopeScaling("llama3", float(divisors.max()))
    plain = rotary_frequencies(config.head_dim, config.rope_theta)
    published = plain / rotary_frequencies(config.head_dim, config.rope_theta, scaling)
    if divisors.shape != published.shape or not np.allclose(divisors, published, rtol=1e-3):
        raise ValueError(f"tensor 'rope_freqs.weight' in {file} is not the frequency scaling of Llama 3.1 and later "
                         f"(shape {divisors.shape}, largest divisor {divisors.max()}); no other is supported")
    return dataclasses.replace(config, rope_scaling=scaling)

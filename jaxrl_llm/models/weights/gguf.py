"""Reads GGUF files: shape of the model from the metadata, weights dequantised tensor by tensor."""
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.attention import rotary_frequencies
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.weights import experts, layout

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}  # and those of `experts`
_GEMMA3_PERIOD = 6  # every sixth layer sees everything, where the file does not say otherwise
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim); nor that


def load(path: Path, dtype: Any = jnp.float32, shardings: layout.Layout | None = None) -> tuple[ModelConfig, dict]:
    """`(ModelConfig, params)` of a GGUF file of the architectures `llama`, `qwen2`, `qwen3`, `gemma3` or of a mixture."""
    from gguf.quants import dequantize

    parts = _readers(path)
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    metadata = {name: field.contents() for name, field in parts[0].fields.items() if not name.startswith("tokenizer.")}

    def read_stored(name):
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing from {path}, which holds {len(tensors)} tensors")
        return np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type))

    config = config_from(metadata, {name: tuple(map(int, t.shape[::-1])) for name, t in tensors.items()}, path)
    if "rope_freqs.weight" in tensors:
        config = _with_llama3_scaling(config, read_stored("rope_freqs.weight"), path)
    places = list(layout.places(config))
    layout.check_nothing_left(tensors.keys() - {place.gguf for place in places} - {"rope_freqs.weight"}, path)

    @functools.lru_cache(maxsize=config.num_layers)  # a parameter's: all devices in turn ask for their pieces of it
    def whole(place):
        tensor = read_stored(place.gguf)
        if place.path[1:2] == ("shared_weight",):  # a matrix of one row is stored as a vector
            tensor = tensor.reshape(1, -1)
        many = () if place.expert is None else (config.experts.count,)
        layout.check_shape(place.gguf, tensor.shape, many + place.shape, path)
        if config.family in ("llama", "mixtral") and place.path[1:2] in (("q",), ("k",)):
            tensor = _halves_from_pairs(tensor, config.head_dim)
        return tensor - config.norm_offset if place.path[-1] == "scale" else tensor  # stored with the offset in it

    def read(place, index):
        if place.expert is None:
            return whole(place)[index]
        return whole(place._replace(hf="", expert=0))[place.expert][index]  # those of a layer are one tensor

    return config, layout.assemble(config, read, dtype, shardings)


def _readers(path: Path) -> list:
    """A reader of the file and, where it is the first of several parts, of the others; ValueError where one is absent."""
    first = _reader(path)
    split = {name.rpartition(".")[2]: field.contents() for name, field in first.fields.items() if name.startswith("split.")}
    count, number = split.get("count", 1), split.get("no", 0)
    if count < 2:
        return [first]
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})", path.stem)
    if named is None or int(named[3]) != count:
        raise ValueError(f"{path} is part {number + 1} of {count}; name the parts NAME-00001-of-{count:05d}.gguf and so on, as "
                         "they were published")
    files = [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if absent := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{path} is part {number + 1} of {count}, and {', '.join(absent)} is not beside it; fetch all "
                                "parts")
    if number != 0:
        raise ValueError(f"{path} is part {number + 1} of {count}; give the first, {files[0].name}, which has the metadata")
    return [first, *map(_reader, files[1:])]


def _reader(path: Path):
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file of {path.stat().st_size} bytes ({error}); "
                         "if its download was cut short, fetch it again") from error


def config_from(metadata: dict, shapes: dict[str, tuple[int, ...]], file: Any) -> ModelConfig:
    """`ModelConfig` from GGUF metadata and tensor shapes (vocabulary size and tied embeddings are told by tensors)."""
    arch = metadata.get("general.architecture")
    mixture = experts.family_of_gguf(arch, metadata)
    if arch not in FAMILIES and mixture is None:
        allowed = {**FAMILIES, **{family.gguf: name for name, family in experts.FAMILIES.items()}}
        raise ValueError(f"{file}: architecture {arch!r} is not supported; supported: {', '.join(allowed)}")
    get = functools.partial(_get, metadata, arch, file)
    if "token_embd.weight" not in shapes:
        raise ValueError(f"tensor 'token_embd.weight' is missing from {file}, which holds {len(shapes)} tensors")
    hidden_size, num_heads, num_layers = get("embedding_length"), get("attention.head_count"), get("block_count")
    head_dim = get("attention.key_length", get("rope.dimension_count", hidden_size // num_heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{file}: {arch}.{key}={get(key)} is not supported; supported: the head dimension, "
                             f"{head_dim}")
    common = dict(
        vocab_size=shapes["token_embd.weight"][0], hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads), head_dim=head_dim,
        mlp_size=get("feed_forward_length"), max_positions=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"), tie_embeddings="output.weight" not in shapes,
        rope_theta=get("rope.freq_base", 1e6 if arch == "gemma3" else 1e4), rope_scaling=_scaling_from(get, file),
        family=mixture or FAMILIES[arch], qkv_bias=arch == "qwen2", qk_norm=arch in ("qwen3", "gemma3"),
        experts=experts.from_gguf(mixture, get))
    if mixture is not None:
        row = experts.FAMILIES[mixture]
        common |= dict(qkv_bias=row.qkv_bias, qk_norm=row.qk_norm, qk_norm_wide=row.qk_norm_wide)
    if arch != "gemma3":
        return ModelConfig(**common)
    if get("final_logit_softcapping", 0.0):
        raise ValueError(f"{file}: gemma3.final_logit_softcapping={get('final_logit_softcapping')} is not supported; "
                         "supported: none")
    return ModelConfig(
        **common, activation="gelu_tanh", norm_offset=1.0, post_norms=True, embedding_scale=hidden_size**0.5,
        attention_scale=(hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim) ** -0.5,
        rope_local_theta=get("rope.freq_base_swa", 1e4), window=get("attention.sliding_window"),
        local_layers=_gemma3_local_layers(metadata.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PERIOD), num_layers,
                                          file))


def _gemma3_local_layers(pattern, num_layers: int, file) -> tuple[bool, ...]:
    """Which layers have a sliding window: all but every n-th, or as a list says it layer by layer."""
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ValueError(f"{file}: gemma3.attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} "
                             "layers")
        return tuple(map(bool, pattern))
    return tuple(bool(pattern) and (i + 1) % pattern != 0 for i in range(num_layers))


def _get(metadata, arch, file, key, *default):
    """One value that all layers share, of the architecture's own keys."""
    if f"{arch}.{key}" not in metadata and not default:
        raise ValueError(f"{file}: metadata key '{arch}.{key}' is missing")
    value = metadata.get(f"{arch}.{key}", *default)
    if isinstance(value, list):
        raise ValueError(f"{file}: '{arch}.{key}' differs between layers ({value}); supported: one value for all")
    return value


def _scaling_from(get, file) -> RopeScaling | None:
    factor = float(get("rope.scaling.factor", 0.0) or get("rope.scale_linear", 0.0))  # the second is the older key
    kind = get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        raise ValueError(f"{file}: rope scaling {kind!r} is not supported; supported: 'none', 'linear', or divisors in "
                         "the tensor 'rope_freqs.weight'")
    return RopeScaling("linear", factor)


def _with_llama3_scaling(config, divisors, file):
    """Llama 3.1 and later store only each frequency's divisor: take the published ramp and check that it fits."""
    scaling = RopeScaling("llama3", float(divisors.max()))
    plain = rotary_frequencies(config.head_dim, config.rope_theta)
    published = plain / rotary_frequencies(config.head_dim, config.rope_theta, scaling)
    if divisors.shape != published.shape or not np.allclose(divisors, published, rtol=1e-3):
        raise ValueError(f"tensor 'rope_freqs.weight' in {file} is not the frequency scaling of Llama 3.1 and later "
                         f"(shape {divisors.shape}, largest divisor {divisors.max()}); no other is supported")
    return dataclasses.replace(config, rope_scaling=scaling)


def _halves_from_pairs(tensor, head_dim):
    """Row order of rotary pairs (i, i + head_dim/2) from the adjacent pairs (2i, 2i + 1) that this format keeps."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)

"""Rotary embeddings in `config.json`: `rope_parameters`, one set or one per layer type, or the older `rope_scaling`."""
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig, RopeScaling

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_PER_LAYER_TYPE = ("full_attention", "sliding_attention")


def lifted(raw: Mapping[str, Any]) -> dict:
    """The config with `rope_theta` and `partial_rotary_factor` where older releases keep them, at the top."""
    parameters = raw.get("rope_parameters") or {}
    parameters = parameters.get("full_attention") or parameters
    keys = ("rope_theta", "partial_rotary_factor")
    return dict(raw) | {key: parameters[key] for key in keys if parameters.get(key) is not None}


def read(raw: Mapping[str, Any], any_local: bool, file: Any) -> dict:
    """Rotary fields of `ModelConfig`.

    Sliding-window layers share the fields of the others, or have their own base (`rope_local_base_freq`) and no scaling.
    """
    parameters = raw.get("rope_parameters") or {}
    if any(parameters.get(kind) for kind in _PER_LAYER_TYPE):
        full, local = (parameters.get(kind) or {} for kind in _PER_LAYER_TYPE)
    else:
        full = parameters or raw.get("rope_scaling") or {}
        local = {} if "rope_local_base_freq" in raw else full
    theta = float(full.get("rope_theta", raw["rope_theta"]))
    fields = dict(rope_theta=theta, rope_scaling=_scaling(full, raw, file))
    if not any_local:
        return fields
    local_theta = float(local.get("rope_theta", raw.get("rope_local_base_freq", theta)))
    return fields | dict(rope_local_theta=local_theta, rope_local_scaling=_scaling(local, raw, file))


def _scaling(parameters, raw, file) -> RopeScaling | None:
    def get(key, *default):
        return _number(parameters, key, file, *default)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"{file}: rope type {kind!r} is not supported; supported: {', '.join(map(repr, KINDS))}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(get("factor")))
    if kind == "dynamic":  # the config's length is the original one, whatever else it says
        return RopeScaling("dynamic", float(get("factor")), original_max_positions=raw["max_position_embeddings"])
    original = raw.get("original_max_position_embeddings") or get("original_max_position_embeddings",
                                                                  raw["max_position_embeddings"])
    if kind == "llama3":
        low, high = float(get("low_freq_factor")), float(get("high_freq_factor"))
        if low >= high:
            raise ValueError(f"{file}: high_freq_factor={high} of the rope parameters is not above low_freq_factor={low}")
        return RopeScaling("llama3", float(get("factor")), low, high, original)
    if kind == "yarn":
        factor = float(get("factor", raw["max_position_embeddings"] / original))
        return RopeScaling("yarn", factor, float(get("beta_slow", 1) or 1), float(get("beta_fast", 32) or 32), original,
                           get("attention_factor", _yarn_attention(factor, parameters)), get("truncate", True),
                           query_growth=get("llama_4_scaling_beta", 0.0))
    factor = float(get("factor", raw["max_position_embeddings"] / original))
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, get(key))) for key in ("short_factor", "long_factor"))
    return RopeScaling("longrope", factor, original_max_positions=original, short_factors=short, long_factors=long,
                       attention_factor=get("attention_factor", attention))


def _number(parameters, key, file, *default):
    value = parameters.get(key)
    if value is None and not default:
        raise ValueError(f"{file}: {key} is missing from the rope parameters {dict(parameters)}")
    return default[0] if value is None else value


def _yarn_attention(factor, parameters) -> float:
    """Factor on cosines and sines: 0.1 log(factor) + 1 (arXiv 2309.00071), or the quotient of two such with `mscale`s."""
    def scaled(m):
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scaled(above) / scaled(below) if above and below else scaled(1.0)


def written(c: ModelConfig, own_local: bool) -> dict:
    """The keys that `read` reads: the older ones, which all readers know, and both forms if windows have their own base."""
    scaling = None if c.rope_scaling is None else _parameters(c.rope_scaling)
    keys = {"rope_theta": c.rope_theta, "rope_scaling": scaling}
    if scaling and scaling["rope_type"] == "longrope":
        keys["original_max_position_embeddings"] = c.rope_scaling.original_max_positions
    if own_local:
        both = [(c.rope_theta, c.rope_scaling), (c.rope_local_theta, c.rope_local_scaling)]
        keys |= {"rope_local_base_freq": c.rope_local_theta, "rope_parameters": {
            kind: {"rope_theta": theta, **({"rope_type": "default"} if scaling is None else _parameters(scaling))}
            for kind, (theta, scaling) in zip(_PER_LAYER_TYPE, both)}}
    return keys


def _parameters(s: RopeScaling) -> dict:
    parameters: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = s.original_max_positions
    if s.kind == "llama3":
        parameters |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        parameters |= {"beta_slow": s.low_freq_factor, "beta_fast": s.high_freq_factor, "truncate": s.truncate,
                       "attention_factor": s.attention_factor}
        parameters |= {"llama_4_scaling_beta": s.query_growth} if s.query_growth else {}
    if s.kind == "longrope":
        parameters |= {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors),
                       "attention_factor": s.attention_factor}
    return parameters

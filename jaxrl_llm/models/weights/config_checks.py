"""Types and ranges of all keys of a `config.json` that a family reads, as published or from the metadata of a GGUF file."""
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

LAYERS = 1 << 14  # lists with an entry for each layer are made before the tensors are counted
_SIZE = (1 << 31) - 1
_LARGEST = 1e30


class _Rule(NamedTuple):
    """Which values are right, in code and in words."""

    right: Callable[[Any], bool]
    words: str


def _whole(least: int = 1, most: int = _SIZE) -> _Rule:
    return _Rule(lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}")


def _number(least: float, most: float = _LARGEST, words: str = "") -> _Rule:
    """A number above `least`, or with `words` that say so from it on."""
    return _Rule(lambda value: type(value) in (int, float) and (least <= value if words else least < value) and value <= most,
                 words or f"a number above {least:g}" + f", {most:g} at most" * (most < _LARGEST))


def _list_of(rule: _Rule) -> _Rule:
    return _Rule(lambda value: type(value) is list and all(map(rule.right, value)), f"a list whose entries are {rule.words}")


_POSITIVE = _number(0)
_FLAG = _Rule(lambda value: type(value) is bool, "true or false")
_TEXT = _Rule(lambda value: type(value) is str, "a text")
_OBJECT = _Rule(lambda value: type(value) is dict, "an object")
KEYS: Mapping[str, _Rule] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                     "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size", "sliding_window_pattern",
                     "no_rope_layer_interval"), _whole()),
    **dict.fromkeys(("num_experts", "num_local_experts"), _whole(most=LAYERS)),
    **dict.fromkeys(("sliding_window", "max_window_layers", "shared_expert_intermediate_size", "decoder_sparse_step"),
                    _whole(0)),
    "num_hidden_layers": _whole(most=LAYERS), "original_max_position_embeddings": _whole(2),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
                     "final_logit_softcapping", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
                     "logits_scaling"), _POSITIVE),
    "rms_norm_eps": _number(0, 1, "a number from 0 to 1"), "partial_rotary_factor": _number(0, 1),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_sliding_window", "norm_topk_prob"),
                    _FLAG),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _TEXT),
    "layer_types": _list_of(_TEXT), "no_rope_layers": _list_of(_Rule(lambda x: type(x) in (bool, int), "0 or 1")),
    "mlp_only_layers": _list_of(_whole(0)), "rope_scaling": _OBJECT, "rope_parameters": _OBJECT,
}
_ROPE: Mapping[str, _Rule] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                     "attention_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), _number(0, words="a number from 0 on")),
    **dict.fromkeys(("short_factor", "long_factor"), _list_of(_POSITIVE)),
    "partial_rotary_factor": _number(0, 1), "original_max_position_embeddings": _whole(2), "truncate": _FLAG,
    **dict.fromkeys(("full_attention", "sliding_attention"), _OBJECT),
}


def check(raw: Mapping[str, Any], keys: Iterable[str], file: Any) -> None:
    """Raises ValueError with file and key for the first of `keys` whose value has a wrong type or range; null is as absent."""
    for key in keys:
        _check(raw, key, KEYS[key], file, key)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(key) or {}
        _check_rope(parameters, file, key)
        for kind in ("full_attention", "sliding_attention"):
            _check_rope(parameters.get(kind) or {}, file, f"{key}.{kind}")


def _check_rope(parameters, file, key) -> None:
    for name, rule in _ROPE.items():
        _check(parameters, name, rule, file, f"{key}.{name}")


def _check(values, key, rule, file, shown) -> None:
    value = values.get(key)
    if value is not None and not rule.right(value):
        raise ValueError(f"{file}: {shown}={str(value)[:80]!r} of type {type(value).__name__} is not supported; expected "
                         f"{rule.words}")

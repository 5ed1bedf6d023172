"""`config.json` as `ModelConfig` and back, by the tables of `models.families`."""
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import ACTIVATIONS, DEFAULTS, PLAIN, Family
from jaxrl_llm.models.weights import config_checks, rope_json
from jaxrl_llm.tools.files import typed

_NULL_MEANS_OFF = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # elsewhere null is as good as absent
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")  # stated outside the text part of a multimodal model


def config_from(raw: Mapping[str, Any], file: Any = "config.json") -> ModelConfig:
    """`ModelConfig` from the contents of a `config.json`, in the form of current or of older transformers releases."""
    family = families.of_model_type(raw.get("model_type"), file)
    if raw["model_type"] in family.multimodal:
        typed(raw, "text_config", dict, file, "an object")
        whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
        stated = {key: value for key, value in whole.items() if value}  # off means that the text part decides
        raw = whole | (raw.get("text_config") or dict(raw)) | stated
        family = families.of_model_type(raw.get("model_type", family.name), file)
    return of_family(family, raw, file)


def of_family(family: Family, raw: Mapping[str, Any], file: Any) -> ModelConfig:
    """As `config_from`, of a known family: its defaults, its refusals, then every field from its key."""
    config_checks.check(raw, family.read_keys(), file)
    try:
        return _of_checked(family, raw, file)
    except ValueError as error:  # of values that do not fit each other
        raise error if str(error).startswith(str(file)) else ValueError(f"{file}: {error}") from error


def _of_checked(family: Family, raw: Mapping[str, Any], file: Any) -> ModelConfig:
    raw = rope_json.lifted(family.prepare(dict(raw)))
    raw = raw if family.mixture is None else family.mixture.renamed(raw)
    raw = _with_defaults(family, raw)
    _refuse(family, raw, file)
    keys = {field: family.key(field) for field in family.fields()}
    fields = {field: key.read(raw[key.name]) for field, key in keys.items() if raw.get(key.name) is not None}
    fields |= {name: value(fields) if callable(value) else value for name, value in family.fixed.items()}
    if family.mixture is not None:
        fields["experts"] = family.mixture.read(raw, file)
    local = tuple(kind == "sliding_attention" for kind in _layer_types(family, raw, file))
    return ModelConfig(**fields, **rope_json.read(raw, any(local), file), local_layers=local,
                       window=raw.get("sliding_window") if any(local) else None, family=family.written_as or family.name)


def _with_defaults(family, raw) -> dict:
    """The config, with omitted keys filled in as transformers does for its family; functions of other keys come last."""
    defaults = DEFAULTS | family.defaults
    raw = {key: value for key, value in raw.items() if value is not None or key in _NULL_MEANS_OFF}
    raw = {key: value for key, value in defaults.items() if not callable(value)} | raw
    for key, value in defaults.items():
        if callable(value) and key not in raw:
            raw[key] = value(raw)
    return raw


def _refuse(family, raw, file):
    for key, plain in PLAIN.items():
        if key not in family.stated() and raw.get(key) not in plain:
            raise ValueError(f"{file}: {key}={raw[key]!r} is not supported for {family.name}; supported: {plain[-1]!r}")
    key = family.key("activation").name
    if raw[key] not in ACTIVATIONS:
        raise ValueError(f"{file}: {key}={raw[key]!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


def _layer_types(family, raw, file) -> list[str]:
    """The kind of each layer: as stated, if the family's configs state it, or as its defaults derive it."""
    derived = family.defaults.get("layer_types", lambda raw: ["full_attention"] * raw["num_hidden_layers"])
    kinds = raw.get("layer_types", derived(raw))
    allowed = {"full_attention", "sliding_attention"} if family.layer_types else set(derived(raw))
    if other := set(kinds) - allowed:
        raise ValueError(f"{file}: layer_types {', '.join(sorted(other))} not supported for {family.name}; supported: "
                         f"{', '.join(sorted(allowed))}")
    return kinds


def written(config: ModelConfig) -> dict:
    """The contents of `config.json`, with keys that older and current readers know.

    Raises ValueError: the config has a feature that its family's format cannot state, and which would be lost silently.
    """
    family = families.by_name(config.family)
    described: dict[str, Any] = dict(architectures=[family.architecture], model_type=family.name, bos_token_id=None,
                                     eos_token_id=None, pad_token_id=None)
    for field in family.fields():
        key = family.key(field)
        value = getattr(config, field)
        described[key.name] = None if value is None else key.write(value)
    if family.mixture is not None and config.experts is not None:
        described |= family.mixture.written(config.experts)
    described |= rope_json.written(config, "rope_local_base_freq" in family.defaults)
    if "layer_types" in family.defaults:
        described["sliding_window"] = config.window
    if family.layer_types:
        described |= dict(use_sliding_window=any(config.local_layers), layer_types=[
            "sliding_attention" if local else "full_attention" for local in config.local_layers])
    back = config_from(described)
    lost = [f"{field.name}={getattr(config, field.name)!r}" for field in dataclasses.fields(ModelConfig)
            if getattr(config, field.name) != getattr(back, field.name)]
    if lost:
        raise ValueError(f"the format of family {config.family!r} cannot say {', '.join(lost)}; choose the family "
                         "whose architecture this is")
    return described

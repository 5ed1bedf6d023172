"""The model families whose checkpoints can be read and written: one file per family, discovered automatically.

A file holds one `FAMILY`, a table of what is specific to it: keys and defaults of its `config.json`, features of the
architecture that no key states, names of tensors, the same for GGUF. `ModelConfig` covers what `models.transformer` computes.
"""
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_llm.models.families.family import Family

__all__ = ["Family", "by_name", "families", "of_gguf", "of_model_type"]

_HYBRIDS = ("qwen3next", "qwen35", "falconh1", "kimilinear", "bamba", "granitemoehybrid", "granitehybrid", "nemotronh", "lfm2",
            "jamba", "olmohybrid", "minimax")
_STATEFUL = (" (its layers with linear attention or a state space carry a state from token to token, which neither the packed "
             "rows of training nor the caches of sampling hold)")


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    listed = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return MappingProxyType({family.name: family for family in listed})


def by_name(name: str) -> Family:
    """The family that a `ModelConfig` names; ValueError for another."""
    if name not in families():
        raise ValueError(f"family {name!r} has no export format; supported: {', '.join(families())}")
    return families()[name]


def of_model_type(model_type: Any, file: Any) -> Family:
    """The family of the `model_type` of a `config.json`, of a text model or of a multimodal model that contains it."""
    for family in families().values():
        if model_type in (family.name, *family.multimodal):
            return family
    raise ValueError(f"{file}: model_type {model_type!r} is not supported{_reason(model_type)}; supported: "
                     f"{', '.join(families())}")


def of_gguf(metadata: Mapping[str, Any], file: Any) -> Family:
    """The family of a GGUF file, by its `general.architecture` and, where families share one, by its keys."""
    architecture = metadata.get("general.architecture")
    known = {family.gguf.architecture: family for family in families().values()
             if family.gguf and (family.gguf.only_with is None or f"{architecture}.{family.gguf.only_with}" in metadata)}
    if architecture not in known:
        raise ValueError(f"{file}: architecture {architecture!r} is not supported{_reason(architecture)}; supported: "
                         f"{', '.join(known)}")
    return known[architecture]


def _reason(name) -> str:
    """Why a family is missing, if it is missing on purpose."""
    plain = str(name).replace("_", "").removesuffix("moe").removesuffix("text").removesuffix("moe")
    return _STATEFUL if plain in _HYBRIDS else ""

"""Mixtures of experts in checkpoints: one row for each family, with what it says otherwise than the others."""
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.models.config import Experts, ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of mixtures in checkpoints.

    Attributes:
      architecture: the class of transformers.
      gguf: the architecture's name in GGUF files.
      count: key of `config.json` with the number of experts, as published.
      size: key with the width of one.
      names: module of our tree -> its name in Hugging Face files (`{}` stands for the expert), its name in GGUF files.
      normalize: whether the weights of a token's experts add up to 1, where the format does not say it: `config.json` of
        Mixtral, and GGUF files.
      qkv_bias, qk_norm, qk_norm_wide: as in `ModelConfig`; a bias may be left away by the key of that name.
      defaults: what a `config.json` may leave out.
    """

    architecture: str
    gguf: str
    count: str
    size: str
    names: Mapping[str, tuple[str, str]]
    normalize: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _named(router: str, experts: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    return {"router": (router, "ffn_gate_inp"), "experts_gate": (f"{experts}.{{}}.{gate}", "ffn_gate_exps"),
            "experts_up": (f"{experts}.{{}}.{up}", "ffn_up_exps"), "experts_down": (f"{experts}.{{}}.{down}", "ffn_down_exps")}


_PLAIN = _named("mlp.gate", "mlp.experts")
_SHARED = {"shared_gate": ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
           "shared_up": ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
           "shared_down": ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
           "shared_weight": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp")}
FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM", "llama", "num_local_experts", "intermediate_size",
        _named("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"), normalize=True,
        defaults={"rope_theta": 1e6, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", "qwen2moe", "num_experts", "moe_intermediate_size", _PLAIN | _SHARED,
                        normalize=False, qkv_bias=True,
                        defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 16}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3moe", "num_experts", "moe_intermediate_size", _PLAIN, normalize=True,
                        qk_norm=True, defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 4}),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", "num_experts", "intermediate_size", _PLAIN, normalize=False,
                    qk_norm_wide=True, defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
}


def names(family: str) -> Mapping[str, tuple[str, str]]:
    """The modules of a family's mixture and what files call them."""
    return FAMILIES[family].names if family in FAMILIES else {}


def from_json(raw: dict, file: Any) -> Experts | None:
    """The mixture of a `config.json`; None for a dense family.

    Raises:
      ValueError: a key is missing, or some layers have no experts.
    """
    family = FAMILIES.get(raw["model_type"])
    if family is None:
        return None
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{file}: mlp_only_layers={raw.get('mlp_only_layers')}, decoder_sparse_step="
                         f"{raw.get('decoder_sparse_step')} leave layers without experts; supported: experts in all layers "
                         "(an empty list, 1)")
    raw = {family.count: raw.get("num_local_experts")} | raw  # as current releases call it
    shared = ["shared_expert_intermediate_size"] if "shared_gate" in family.names else []
    if absent := [key for key in (family.count, "num_experts_per_tok", family.size, *shared) if raw.get(key) is None]:
        raise ValueError(f"{file}: {', '.join(absent)} missing")
    return Experts(raw[family.count], raw["num_experts_per_tok"], raw[family.size],
                   normalize=True if raw["model_type"] == "mixtral" else raw.get("norm_topk_prob", False),
                   shared_size=raw[shared[0]] if shared else 0)


def local_layers(raw: dict, file: Any) -> tuple[bool, ...]:
    """Which layers have a sliding window, of a `config.json` without `layer_types`: with Mixtral and Qwen3-MoE all or none.

    Raises:
      ValueError: Qwen2-MoE with a window, whose layers take turns in a way that changed between releases.
    """
    stated = raw.get("sliding_window") is not None and raw["model_type"] != "olmoe"
    if raw["model_type"] != "mixtral":
        stated = stated and bool(raw.get("use_sliding_window"))
    if stated and raw["model_type"] == "qwen2_moe":
        raise ValueError(f"{file}: use_sliding_window=true without layer_types is not supported for qwen2_moe; save the model "
                         "with a current release of transformers, which writes layer_types")
    return (stated,) * raw["num_hidden_layers"]


def to_json(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that say a mixture; none for a dense family."""
    name, experts = config.family, config.experts
    if experts is None or name not in FAMILIES:
        return {}
    family = FAMILIES[name]
    said = {family.count: experts.count, "num_experts_per_tok": experts.per_token, family.size: experts.size}
    if name != "mixtral":
        said["norm_topk_prob"] = experts.normalize
    if "shared_gate" in family.names:
        said["shared_expert_intermediate_size"] = experts.shared_size
    if family.qkv_bias:
        said["qkv_bias"] = config.qkv_bias
    return said


def family_of_gguf(arch: str, metadata: dict) -> str | None:
    """The family of mixtures that a GGUF file holds; None for a dense one."""
    if not metadata.get(f"{arch}.expert_count"):
        return None
    return next((name for name, family in FAMILIES.items() if family.gguf == arch), None)


def from_gguf(name: str | None, get: Callable) -> Experts | None:
    """The mixture of a GGUF file's metadata, `get(key, *default)`; None for a dense family."""
    if name is None:
        return None
    family = FAMILIES[name]
    size = get("feed_forward_length") if family.size == "intermediate_size" else get("expert_feed_forward_length")
    return Experts(get("expert_count"), get("expert_used_count"), get("expert_feed_forward_length", size),
                   normalize=get("expert_weights_norm", family.normalize),
                   shared_size=get("expert_shared_feed_forward_length") if "shared_gate" in family.names else 0)

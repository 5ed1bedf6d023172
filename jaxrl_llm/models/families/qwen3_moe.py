"""Qwen3-MoE: a Qwen3 with a mixture of experts instead of every MLP."""
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf
from jaxrl_llm.models.families.mistral import all_or_none
from jaxrl_llm.models.families.mixture import NAMES, Mixture


def windows(raw) -> list[str]:
    """`layer_types` of a config without them: windows in all layers, if they are switched on."""
    return all_or_none(raw if raw.get("use_sliding_window") else {**raw, "sliding_window": None})


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE",
    defaults={"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
              "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
              "layer_types": windows, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    keys=ATTENTION_BIAS,
    fixed={"qk_norm": True},
    layer_types=True,
    names=NAMES,
    mixture=Mixture(count="num_experts", size="moe_intermediate_size", gguf_normalize=True),
    gguf=Gguf("qwen3moe"),
)

"""Qwen1.5-MoE and Qwen2-MoE: experts, plus one that computes every token, multiplied by its own gate."""
from jaxrl_llm.models.families.family import Family, Gguf
from jaxrl_llm.models.families.mixture import NAMES, Mixture


def no_windows(raw) -> list[str]:
    """`layer_types` of a config without them: layers take turns at windows in a way that changed between releases."""
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ValueError("use_sliding_window=true without layer_types is not supported for qwen2_moe; save the model with a "
                         "current release of transformers, which writes layer_types")
    return ["full_attention"] * raw["num_hidden_layers"]


FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    title="Qwen1.5-MoE, Qwen2-MoE",
    defaults={"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
              "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
              "qkv_bias": True, "layer_types": no_windows, "num_experts": 60, "num_experts_per_tok": 4,
              "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    keys={"qkv_bias": "qkv_bias"},
    layer_types=True,
    names=NAMES | {"shared_gate": ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
                   "shared_up": ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
                   "shared_down": ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
                   "shared_weight": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp")},
    mixture=Mixture(count="num_experts", size="moe_intermediate_size", shared="shared_expert_intermediate_size"),
    gguf=Gguf("qwen2moe"),
)

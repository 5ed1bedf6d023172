"""Mistral 7B, Nemo and Small: one sliding window in all layers, or none."""
from jaxrl_llm.models.families.family import Family


def all_or_none(raw) -> list[str]:
    """`layer_types` of a config whose `sliding_window` holds for every layer."""
    return ["sliding_attention" if raw.get("sliding_window") else "full_attention"] * raw["num_hidden_layers"]


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    title="Mistral",
    defaults={"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
              "sliding_window": 4096, "layer_types": all_or_none},
    multimodal=("mistral3",),
)  # GGUF files of these models call themselves `llama`

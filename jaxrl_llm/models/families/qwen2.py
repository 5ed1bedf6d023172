"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values."""
from jaxrl_llm.models.families.family import Family, Gguf, windows_from


def first_window(raw) -> int:
    """The first layer with a sliding window; that after the last, if the windows are switched off."""
    on = raw.get("use_sliding_window") and raw.get("sliding_window")
    return raw["max_window_layers"] if on else raw["num_hidden_layers"]


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    title="Qwen2, Qwen2.5",
    defaults={"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
              "sliding_window": 4096, "max_window_layers": 28, "layer_types": windows_from(first_window)},
    fixed={"qkv_bias": True},
    layer_types=True,
    gguf=Gguf("qwen2"),
)

"""SmolLM3: every fourth layer leaves queries and keys as they are (no rotary embedding)."""
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf, TranslatedKey


def _layer_types(raw):
    """Windows, if switched on, are those of the layers that do not rotate."""
    on = raw.get("use_sliding_window") and raw.get("sliding_window")
    return ["sliding_attention" if on and not rotated else "full_attention" for rotated in raw["no_rope_layers"]]


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    title="SmolLM3",
    defaults={"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
              "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
              "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
              "no_rope_layers": lambda raw: [
                  int((i + 1) % raw["no_rope_layer_interval"] != 0) for i in range(raw["num_hidden_layers"])],
              "layer_types": _layer_types},
    keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias", "rotary_layers": TranslatedKey(  # 1 where a layer rotates, against its name
        "no_rope_layers", lambda flags: tuple(map(bool, flags)), lambda layers: list(map(int, layers)))},
    layer_types=True,
    gguf=Gguf("smollm3", paired=True),
)

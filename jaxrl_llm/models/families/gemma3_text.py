"""Gemma 3 (text): norms on both sides of attention and MLP, five layers with a window and one without, in turn."""
from jaxrl_llm.models.families.family import (
    ATTENTION_BIAS,
    Family,
    Gguf,
    activation,
    layer_types_in_gguf,
    query_scalar,
    windows_but_every,
)

_PERIOD = 6  # every sixth layer sees everything; most GGUF files do not say so
_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim); GGUF files do not say that either

GEMMA_KEYS = ATTENTION_BIAS | {
    "activation": activation("hidden_activation"), "attention_scale": query_scalar(),
    "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
GEMMA_FIXED = {"norm_offset": 1.0, "post_norms": True, "embedding_scale": lambda fields: fields["hidden_size"] ** 0.5}
GEMMA_NAMES = {  # `post_attention_layernorm` has its literal meaning
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}


def scalar_in_gguf(raw, layers_of_27b: int) -> dict:
    """`query_pre_attn_scalar`: the head dimension, but in the largest size the share of a head in the width."""
    largest = raw["num_hidden_layers"] == layers_of_27b
    return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if largest else raw["head_dim"]}


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    title="Gemma 3",
    defaults={"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
              "sliding_window": 4096, "sliding_window_pattern": _PERIOD, "hidden_activation": "gelu_pytorch_tanh",
              "tie_word_embeddings": True, "layer_types": windows_but_every(lambda raw: raw["sliding_window_pattern"])},
    keys=GEMMA_KEYS,
    fixed=GEMMA_FIXED | {"qk_norm": True},
    layer_types=True,
    names=GEMMA_NAMES,
    multimodal=("gemma3",),
    gguf=Gguf("gemma3", required=("attention.sliding_window",), keys={
        "attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping", "attn_logit_softcapping": "attn_logit_softcapping"},
        derived=lambda metadata, raw: scalar_in_gguf(raw, _27B_LAYERS) | layer_types_in_gguf(metadata, raw, _PERIOD)),
)

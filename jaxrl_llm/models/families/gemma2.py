"""Gemma 2: soft caps on attention scores and logits, a window in every other layer (arXiv 2408.00118)."""
from jaxrl_llm.models.families.family import Family, Gguf, layer_types_in_gguf, windows_but_every
from jaxrl_llm.models.families.gemma3_text import GEMMA_FIXED, GEMMA_KEYS, GEMMA_NAMES, scalar_in_gguf

_27B_LAYERS = 46  # the one size whose attention scale is not 1/sqrt(head_dim); GGUF files do not say that

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    defaults={"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
              "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
              "attn_logit_softcapping": 50.0, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
              "tie_word_embeddings": True, "layer_types": windows_but_every(lambda raw: 2)},
    keys=GEMMA_KEYS,
    fixed=GEMMA_FIXED,
    layer_types=True,
    names=GEMMA_NAMES,
    gguf=Gguf("gemma2", required=("attention.sliding_window",), keys={
        "attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
        "attn_logit_softcapping": "attn_logit_softcapping"},
        derived=lambda metadata, raw: scalar_in_gguf(raw, _27B_LAYERS) | layer_types_in_gguf(metadata, raw, 2)),
)

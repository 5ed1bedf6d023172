"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: one tensor for queries, keys and values, one for gate and up projection, longrope."""
from jaxrl_llm.models.families.family import Family, Gguf
from jaxrl_llm.models.families.mistral import all_or_none


def _prepare(raw):
    """Renames the scaling of the first releases, which is called `su` or, with the same meaning, `yarn`."""
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
        raw["rope_scaling"] = scaling | {"rope_type": "longrope"}
    return raw


FUSED_MLP = dict.fromkeys(("gate", "up"), ("mlp.gate_up_proj", "ffn_up"))

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    title="Phi-3, Phi-4",
    defaults={"vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
              "rms_norm_eps": 1e-5, "layer_types": all_or_none},
    keys={"rotary_factor": "partial_rotary_factor"},
    names=dict.fromkeys(("q", "k", "v"), ("self_attn.qkv_proj", "attn_qkv")) | FUSED_MLP,
    prepare=_prepare,
    gguf=Gguf("phi3", keys={"attention.sliding_window": "sliding_window",
                            "rope.scaling.original_context_length": "original_max_position_embeddings"}),
)

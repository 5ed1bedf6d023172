"""GLM-4-0414: half of each head is rotated, in adjacent pairs; norms on both sides; gate and up projection in one tensor."""
from jaxrl_llm.models.families.family import Family, Gguf
from jaxrl_llm.models.families.phi3 import FUSED_MLP

FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    title="GLM-4",
    defaults={"vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
              "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5},
    keys={"qkv_bias": "attention_bias", "rotary_factor": "partial_rotary_factor"},
    fixed={"post_norms": True},
    names={"attention_post_norm": ("post_self_attn_layernorm", "post_attention_norm"),
           "mlp_post_norm": ("post_mlp_layernorm", "post_ffw_norm")} | FUSED_MLP,
    paired=True,
    gguf=Gguf("glm4", paired=True),
)

"""OLMo 2: norms on the output of attention and MLP alone, and over queries and keys of all heads together."""
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    title="OLMo 2",
    defaults={"vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    keys=ATTENTION_BIAS,
    fixed={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
    names={"attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
           "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm")},
    gguf=Gguf("olmo2"),
)

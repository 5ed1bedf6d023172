"""Llama 2 and 3, SmolLM and SmolLM2, and the many models that are written in their form."""
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    title="Llama 2 and 3, SmolLM2",
    defaults={"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    gguf=Gguf("llama", paired=True),
)

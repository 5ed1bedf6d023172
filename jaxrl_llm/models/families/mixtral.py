"""Mixtral: a Mistral with a mixture of experts instead of every MLP."""
from jaxrl_llm.models.families.family import Family, Gguf
from jaxrl_llm.models.families.mistral import all_or_none
from jaxrl_llm.models.families.mixture import Mixture, named

MIXTURE = Mixture(count="num_local_experts", size="intermediate_size", normalize=True, gguf_normalize=True)
FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    defaults={"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
              "rope_theta": 1e6, "layer_types": all_or_none, "num_local_experts": 8, "num_experts_per_tok": 2},
    names=named("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    mixture=MIXTURE,
    gguf=Gguf("llama", paired=True, only_with="expert_count"),
)

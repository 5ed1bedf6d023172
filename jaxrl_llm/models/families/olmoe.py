"""OLMoE: a mixture of experts, with norms over queries and keys of all heads together."""
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf
from jaxrl_llm.models.families.mixture import NAMES, Mixture

FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    defaults={"vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
              "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
              "num_experts_per_tok": 8},
    keys=ATTENTION_BIAS,
    fixed={"qk_norm": True, "qk_norm_whole": True},
    names=NAMES,
    mixture=Mixture(count="num_experts", size="intermediate_size"),
    gguf=Gguf("olmoe"),
)

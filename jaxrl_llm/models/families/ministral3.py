"""Ministral 3: YaRN, and queries that grow with the logarithm of their position beyond the original context."""
from jaxrl_llm.models.families import mistral
from jaxrl_llm.models.families.family import Family

_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
         "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    title="Ministral 3",
    defaults=mistral.FAMILY.defaults | {
        "vocab_size": 131_072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5, "sliding_window": None, "rope_parameters": lambda raw: None if "rope_scaling" in raw else _ROPE})

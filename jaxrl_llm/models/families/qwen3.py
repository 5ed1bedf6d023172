"""Qwen3 (dense): norms over each head of queries and keys."""
from jaxrl_llm.models.families import qwen2
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf

FAMILY = Family(name="qwen3", architecture="Qwen3ForCausalLM", title="Qwen3",
                defaults=qwen2.FAMILY.defaults | {"head_dim": 128}, keys=ATTENTION_BIAS, fixed={"qk_norm": True},
                layer_types=True, gguf=Gguf("qwen3"))

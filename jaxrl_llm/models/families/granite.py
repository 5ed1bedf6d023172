"""Granite 3 (dense): multipliers on embeddings, attention scores, residual additions and logits."""
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.families.family import Family, Gguf

FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    title="Granite 3",
    defaults=llama.FAMILY.defaults | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0,
                                      "logits_scaling": 1.0},
    keys=llama.FAMILY.keys | {"embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
                              "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling"},
    gguf=Gguf("granite", paired=True, keys={
        "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}),
)

"""Ministral 8B: Mistral with a window in some of its layers."""
from jaxrl_llm.models.families import mistral
from jaxrl_llm.models.families.family import Family

FAMILY = Family(name="ministral", architecture="MinistralForCausalLM", title="Ministral", defaults=mistral.FAMILY.defaults,
                layer_types=True)

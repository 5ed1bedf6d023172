"""GLM-4-9B as first published: GLM-4-0414 without norms on the output of attention and MLP."""
from jaxrl_llm.models.families import glm4
from jaxrl_llm.models.families.family import Family
from jaxrl_llm.models.families.phi3 import FUSED_MLP

FAMILY = Family(name="glm", architecture="GlmForCausalLM", title="GLM-4-9B", defaults=glm4.FAMILY.defaults,
                keys=glm4.FAMILY.keys, names=FUSED_MLP, paired=True)

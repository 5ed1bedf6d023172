"""The default step of experiments/plan.py: a batch of reasoning problems in bfloat16."""
from jaxrl_llm.setup.config import default_config


def get_config():
    c = default_config()
    c.model.dtype = "bfloat16"
    c.prompts.per_step = 64
    c.prompts.max_tokens = 512
    c.sampling.group = 8
    c.sampling.max_tokens = 1024
    return c

"""The smallest run that learns something: a byte model of width 32 is rewarded for lower-case letters."""
from jaxrl_llm.setup.config import default_config


def get_config():
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.rewards = "format(pattern='(?s).*[a-z].*')"  # half of the output of an untrained model
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 6, 4, 4, 6
    c.optimizer.learning_rate, c.optimizer.warmup_updates = 3e-3, 2
    c.eval.every, c.eval.problems, c.checkpoint.every, c.samples_every = 3, 4, 3, 1
    return c

"""A calculator as a tool: products that the policy cannot work out, but can ask for. A policy of 2 layers, from scratch.

A supervised warm-up by the oracle, until some calls and answers are right, then RL on trajectories of two turns.

  python experiments/train.py --config=configs/tools.py --workdir=runs/tools
"""
from jaxrl_llm.training.config import default_config

TEMPLATE = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"


def get_config():
    c = default_config()
    c.environment = "tool_use(options={'level': 'mul2'}, parser=llama3, turns=2)"
    c.model.chat_template = TEMPLATE
    c.model.hidden_size = 64
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 256
    c.prompts.per_step = 16
    c.sampling.group = 8
    c.prompts.max_tokens = 8
    c.sampling.max_turns = 2
    c.sampling.turn_tokens = 72
    c.sampling.max_tokens = 96
    c.warmup.steps = 2000
    c.warmup.batch = 16
    c.warmup.loss = 0.02
    c.warmup.learning_rate = 3e-3
    c.optimizer.learning_rate = 1e-3
    c.steps = 300
    c.eval.problems = 64
    c.eval.every = 100
    return c

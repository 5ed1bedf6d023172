"""A text adventure without download: find the key, take it, open the chest. A policy of 2 layers, from scratch.

A supervised warm-up by the oracle, whose turns are in part random, then RL on trajectories of up to 8 turns.

  python experiments/train.py --config=configs/game.py --workdir=runs/game
"""
from jaxrl_llm.training.config import default_config

TEMPLATE = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"


def get_config():
    c = default_config()
    c.environment = "treasure(size=2, brief=True)"
    c.model.chat_template = TEMPLATE
    c.model.hidden_size = 64
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 256
    c.prompts.per_step = 8
    c.sampling.group = 8
    c.prompts.max_tokens = 64
    c.sampling.max_turns = 8
    c.sampling.turn_tokens = 12
    c.sampling.max_tokens = 320
    c.warmup.steps = 300
    c.warmup.batch = 16
    c.warmup.strays = 0.2
    c.warmup.learning_rate = 3e-3
    c.optimizer.learning_rate = 5e-4
    c.optimizer.schedule = "linear"  # at a constant rate held-out mazes are lost again once all training ones are won
    c.steps = 80
    c.eval.problems = 64
    c.eval.every = 40
    return c

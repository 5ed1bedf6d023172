"""Direct preference optimisation on pairs of texts.

  bash scripts/setup.sh && source .venv/bin/activate
  python experiments/train.py --config=configs/sft.py --workdir=runs/sft
  python experiments/train.py --config=configs/dpo.py --workdir=runs/dpo --config.model.path=runs/sft

The chosen text of a pair is the answer of a sum of two numbers of three digits, and the rejected text is that of another sum.
The policy of the second command is that of the first; without model.path it is a new one of the same size, which learns to
tell the texts of a pair apart.
"""
from jaxrl_llm.setup.config import default_config


def get_config():
    c = default_config()
    c.method = "dpo"
    c.task = "arithmetic(level=nozero3)"
    c.model.hidden_size = 96
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 384
    c.steps = 100
    c.prompts.per_step = 32
    c.sampling.group = 1  # of evaluations
    c.sampling.max_tokens = 6
    c.optimizer.learning_rate = 1e-4
    c.eval.problems = 128
    c.eval.every = 25
    return c

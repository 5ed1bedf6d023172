"""Integer arithmetic with a checkable answer.

  bash scripts/setup.sh && source .venv/bin/activate

  :tiny     (default) bytes, a 2-layer policy from scratch, supervised warm-up, then RL. Minutes on two CPU cores.
            python experiments/train.py --config=configs/arithmetic.py --workdir=runs/tiny
  :smollm2  SmolLM2-135M-Instruct with its chat template (get it with scripts/get_smollm2.sh).
            python experiments/train.py --config=configs/arithmetic.py:smollm2 --workdir=runs/smollm2

Every key can be set on the command line: --config.method=dr_grpo --config.steps=200 --config.objective="clip_high=0.28"
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools.registry import one_of


def get_config(variant: str = "tiny"):
    one_of("variant of configs/arithmetic.py", variant, ("tiny", "smollm2"))
    c = default_config()
    return _tiny(c) if variant == "tiny" else _smollm2(c)


def _tiny(c):
    c.task = "arithmetic(level=nozero3)"
    c.model.hidden_size = 96
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 384
    c.warmup.steps = 1000
    c.warmup.loss = 0.35  # right on 30 to 50% of the problems, whatever the seed
    c.warmup.batch = 64
    c.warmup.learning_rate = 3e-3
    c.steps = 400
    c.prompts.per_step = 32
    c.sampling.group = 16
    c.sampling.max_tokens = 6
    c.optimizer.learning_rate = 8e-4
    c.eval.problems = 128
    c.eval.every = 40
    return c


def _smollm2(c):
    c.model.path = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task = "arithmetic(level=digit, chat=True)"
    c.steps = 40
    c.prompts.per_step = 8
    c.sampling.group = 8
    c.sampling.max_tokens = 24
    c.optimizer.learning_rate = 2e-5
    c.eval.problems = 24
    c.eval.every = 10
    c.checkpoint.every = 20
    return c

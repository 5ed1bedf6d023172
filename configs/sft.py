"""Supervised fine-tuning on demonstrations.

  bash scripts/setup.sh && source .venv/bin/activate

  :tiny      (default) sums of two numbers of three digits, a 2-layer policy from scratch. Minutes on two CPU cores.
             python experiments/train.py --config=configs/sft.py --workdir=runs/sft
  :steps     products whose solutions write every step, a 2-layer policy from scratch, which never solves one before.
             python experiments/train.py --config=configs/sft.py:steps --workdir=runs/sft
  :smollm2   adapters of SmolLM2-135M-Instruct on explained solutions of word problems (get it with scripts/get_smollm2.sh).
             python experiments/train.py --config=configs/sft.py:smollm2 --workdir=runs/sft

RL goes on from the weights with the best held-out loss (:steps and :smollm2), or from the last ones (:tiny):

  :tiny      python experiments/train.py --config=configs/arithmetic.py --config.warmup.steps=0 --config.model.path=runs/sft
             --workdir=runs/rl
  :steps     the same with --config.model.path=runs/sft/best --config.task="long_multiplication(digits=3)"
             --config.sampling.max_tokens=40
  :smollm2   python experiments/train.py --config=configs/word_problems.py --config.model.path=runs/sft/best --workdir=runs/rl
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools.registry import one_of


def get_config(variant: str = "tiny"):
    one_of("variant of configs/sft.py", variant, ("tiny", "steps", "smollm2"))
    c = default_config()
    c.method = "sft"
    return {"tiny": _tiny, "steps": _steps, "smollm2": _smollm2}[variant](c)


def _tiny(c):
    c.task = "arithmetic(level=nozero3)"
    c.model.hidden_size = 96
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 384
    c.steps = 400
    c.prompts.per_step = 64
    c.sampling.group = 1  # of evaluations
    c.sampling.max_tokens = 6
    c.optimizer.learning_rate = 3e-3
    c.optimizer.warmup_updates = 20
    c.eval.problems = 128
    c.eval.every = 100
    return c


def _steps(c):
    _tiny(c).task = "long_multiplication(digits=3)"
    c.steps = 1500
    c.sampling.max_tokens = 40
    c.eval.every = 250
    c.checkpoint.best = "-eval/loss"
    return c


def _smollm2(c):
    c.model.path = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task = "word_problems(level=one, most=9, size=400)"
    c.lora.rank = 16
    c.steps = 100
    c.prompts.per_step = 8
    c.sampling.group = 1
    c.sampling.max_tokens = 150
    c.optimizer.learning_rate = 2e-4
    c.eval.problems = 16
    c.eval.every = 25
    c.texts.heldout = 32
    c.checkpoint.best = "-eval/loss"
    return c

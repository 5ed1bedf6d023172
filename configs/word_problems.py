"""Generated word problems with explanations of up to 150 tokens, half of the templates held out: methods on a laptop.

  bash scripts/setup.sh && source .venv/bin/activate
  bash scripts/get_smollm2.sh
  python experiments/train.py --config=configs/word_problems.py --workdir=runs/word_problems

A run trains adapters of SmolLM2-135M on two CPU cores, with 4 problems x 8 completions per step. The score before training is
1/8, see docs/real_model.md.
Another model: --config.model.path=models/Qwen2.5-0.5B-Instruct --config.task="word_problems(level=both)".
"""
from jaxrl_llm.setup.config import default_config


def get_config():
    c = default_config()
    c.model.path = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task = "word_problems(level=one, most=9, size=400)"
    c.lora.rank = 16
    c.steps = 100
    c.prompts.per_step = 4
    c.sampling.group = 8
    c.sampling.max_tokens = 150
    c.sampling.temperature = 0.7
    c.learner.micro_batches = 4
    c.optimizer.learning_rate = 3e-4
    c.eval.problems = 16
    c.eval.every = 5
    c.checkpoint.every = 5
    c.samples_every = 5
    return c

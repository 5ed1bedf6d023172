"""Word problems of one and two steps with explanations of about 100 tokens, generated, half of the templates held out.

  bash scripts/get_smollm2.sh
  python experiments/train.py --config=configs/word_problems.py --workdir=runs/word_problems

SmolLM2-135M on two CPU cores, sized so that methods can be compared there: docs/real_model.md. Another model:
--config.model.path=models/Qwen2.5-0.5B-Instruct.
"""
from jaxrl_llm.training.config import default_config


def get_config():
    c = default_config()
    c.model.path = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task = "word_problems"
    c.steps = 30
    c.prompts.per_step = 8
    c.sampling.group = 8
    c.sampling.max_tokens = 160
    c.optimizer.learning_rate = 2e-5
    c.eval.problems = 32
    c.eval.every = 10
    c.checkpoint.every = 10
    return c

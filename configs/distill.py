"""On-policy distillation on GSM8K: a larger model teaches every token that the policy samples (arXiv 2602.12125, 2306.13649).

  bash scripts/setup.sh data && source .venv/bin/activate
  python experiments/train.py --config=configs/distill.py:qwen2.5_0.5b-h100 --workdir=runs/distill

The advantage of a token is log p_teacher - log p_policy. Training uses no reward; the held-out score shows whether it helps.
A variant's teacher is a larger model with the same tokens (gemma3_1b has none). --config.teacher.path=runs/teacher sets another
teacher, such as a run. A run has 100 steps of 64 problems x 8 completions of up to 512 tokens; the plan estimates at least 3
minutes without the teacher. On a CPU it has 100 steps of 4 problems and 256 tokens.
"""
from jaxrl_llm.configs import gsm8k
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized


def get_config(variant: str = "qwen2.5_0.5b-h100"):
    c = default_config()
    c.method = "gopd"
    c.task = f"dataset(path='openai/gsm8k', subset=main, prompt={gsm8k.PROMPT!r}, extract=gsm8k, invalid=skip)"
    c.steps = 100
    c.prompts.max_tokens = 384
    c.prompts.overlong = "skip"
    c.sampling.max_tokens = 512
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 256
    c.eval.every = 20
    return sized(c, variant, taught=True)

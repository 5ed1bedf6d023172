"""Programs that pass tests: the first 2,000 problems of CodeContests (arXiv 2203.07814), the public tests as the reward.

  bash scripts/setup.sh data && source .venv/bin/activate     # a run then downloads these problems at its start
  python -m jaxrl_llm.sandbox                               # says whether the sandbox for programs works on this machine
  python experiments/train.py --config=configs/code.py:qwen2.5_7b-h100-8 --workdir=runs/code

A run has 500 steps of 64 problems x 8 completions of up to 2,048 tokens; the plan estimates at least 1.9 hours. Problems
without a test, or with more than 1,024 tokens, are dropped. Public tests are few, so a program that passes them can still be
wrong.
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

PROMPT = """{description}

Write a Python program that reads from standard input and writes to standard output. Put it in one ```python block."""


def get_config(variant: str = "qwen2.5_7b-h100-8"):
    c = default_config()
    c.task = (f"dataset(path='deepmind/code_contests', heldout=valid, limit=2000, streaming=True, prompt={PROMPT!r}, "
              "tests=public_tests, invalid=skip)")
    c.steps = 500
    c.prompts.max_tokens = 1024
    c.prompts.overlong = "skip"
    c.sampling.max_tokens = 2048
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 64
    c.eval.every = 50
    return sized(c, variant)

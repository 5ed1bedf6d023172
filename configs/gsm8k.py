"""Grade-school mathematics: GSM8K (arXiv 2110.14168), 7,473 problems to train on and 1,319 held out, the answer in a box.

  bash scripts/setup.sh data && source .venv/bin/activate     # a run then downloads the data set at its start
  python experiments/train.py --config=configs/gsm8k.py:qwen2.5_1.5b-h100-8 --workdir=runs/gsm8k

A run has 500 steps of 64 problems x 8 completions of up to 512 tokens, with each problem four times; the plan estimates at
least 8 minutes. On a CPU it has 100 steps of 4 problems and 256 tokens.
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

PROMPT = r"{question} Think step by step and put the final number in \boxed{}."


def get_config(variant: str = "qwen2.5_1.5b-h100-8"):
    c = default_config()
    c.task = f"dataset(path='openai/gsm8k', subset=main, prompt={PROMPT!r}, extract=gsm8k, invalid=skip)"
    c.steps = 500
    c.prompts.max_tokens = 384
    c.prompts.overlong = "skip"
    c.sampling.max_tokens = 512
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 256
    c.eval.every = 50
    c.checkpoint.best = "eval/score"
    return sized(c, variant)

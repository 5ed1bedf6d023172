r"""Competition mathematics: MATH (arXiv 2103.03874), 12,000 training problems, MATH-500 held out, AIME 2024 evaluated too.

  bash scripts/setup.sh data && source .venv/bin/activate     # a run then downloads the data sets at its start
  python experiments/train.py --config=configs/math.py:qwen2.5_1.5b-h100-8 --workdir=runs/math

To train on the 40,000 problems of DeepScaleR instead of MATH, with a hundredth of them held out (a few have no answer):

  --config.task="dataset(path='agentica-org/DeepScaleR-Preview-Dataset', heldout=0.01, invalid=skip, \
    prompt='{problem} Think step by step and put the final answer in a LaTeX box.')"

A run has 500 steps of 64 problems x 8 completions of up to 2,048 tokens; the plan estimates at least 37 minutes. On a CPU it
has 100 steps of 4 problems and 256 tokens, which is too short for most problems.
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

PROMPT = r"{problem} Think step by step and put the final answer in \boxed{}."


def get_config(variant: str = "qwen2.5_1.5b-h100-8"):
    c = default_config()
    c.task = f"dataset(path='nlile/hendrycks-MATH-benchmark', prompt={PROMPT!r}, invalid=skip)"
    c.steps = 500
    c.prompts.max_tokens = 512
    c.prompts.overlong = "skip"
    c.sampling.max_tokens = 2048
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 256
    c.eval.every = 50
    c.eval.sets = (f"dataset(path='HuggingFaceH4/aime_2024', split='', heldout=train, prompt={PROMPT!r}, label=aime2024, "
                   "problems=30, temperature=0.6, every=100)")
    c.checkpoint.best = "eval/score"
    return sized(c, variant)

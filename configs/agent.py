r"""Competition mathematics with Python: the policy writes programs, reads what they print, and answers in a box.

  bash scripts/setup.sh data && source .venv/bin/activate     # a run then downloads the data set at its start
  python experiments/train.py --config=configs/agent.py:qwen2.5_7b-h100-8 --workdir=runs/agent

The problems are those of configs/math.py: MATH (arXiv 2103.03874), 12,000 to train on, MATH-500 held out. Programs run in the
sandbox, which a machine must allow (`python -m jaxrl_llm.sandbox` says whether it does). A trajectory has up to six turns
and 4,096 tokens, results included; all 64 x 8 of a step are alive together, each with a cache, spread over the devices.
On a TPU pod the launcher starts it on all hosts, see docs/scaling.md:

  --config=configs/agent.py:qwen3_30b_a3b-v5p-16 --config.model.path=/mnt/SHARE/models/Qwen3-30B-A3B --workdir=gs://BUCKET/agent
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

PROMPT = r"{problem} You can run Python programs. Put the final answer in \boxed{}."
PROBLEMS = {"path": "nlile/hendrycks-MATH-benchmark", "prompt": PROMPT, "invalid": "skip"}


def get_config(variant: str = "qwen2.5_7b-h100-8"):
    c = default_config()
    c.environment = f"tool_use(task=dataset, options={PROBLEMS!r}, tools=['python'], parser=hermes, turns=6)"
    c.steps = 200
    c.prompts.max_tokens = 1024
    c.prompts.overlong = "skip"
    c.sampling.max_turns = 6
    c.sampling.max_tokens = 4096
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 256
    c.eval.every = 50
    c.checkpoint.best = "eval/score"
    c = sized(c, variant)
    c.sampling.turn_tokens = min(2048, c.sampling.max_tokens // 2)  # a CPU has 256 tokens
    return c

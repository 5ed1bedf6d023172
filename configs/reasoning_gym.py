"""Four generated tasks in one run: sums, Countdown, sorting and spelling of reasoning_gym (arXiv 2505.24760), no download.

  bash scripts/setup.sh tasks && source .venv/bin/activate
  python experiments/train.py --config=configs/reasoning_gym.py:qwen2.5_1.5b-h100 --workdir=runs/reasoning_gym

Every batch has the same number of problems of each task; `task/LABEL/...` and `eval/LABEL/...` are the metrics of one task.
Advantages are divided by the standard deviation within a task (QwenLong-L1.5, arXiv 2512.12967). A run has 500 steps of 64
problems x 8 completions of up to 512 tokens; the plan estimates at least half an hour. On a CPU it has 100 steps of 4 problems
and 256 tokens.
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

EASY = {"chain_sum": "", "countdown": ", config={'min_numbers': 3, 'max_numbers': 4, 'min_target': 10}",
        "number_sorting": "", "spell_backward": ""}


def get_config(variant: str = "qwen2.5_1.5b-h100"):
    c = default_config()
    c.task = ", ".join(f"reasoning_gym(dataset={name}, label={name}, train_size=2000, heldout_size=200{options})"
                       for name, options in EASY.items())
    c.method = "qwenlong_l15_adv"
    c.steps = 500
    c.prompts.max_tokens = 256
    c.prompts.overlong = "skip"
    c.sampling.max_tokens = 512
    c.optimizer.learning_rate = 1e-6
    c.eval.problems = 128
    c.eval.every = 50
    return sized(c, variant)

"""The tasks of the embedded benchmark suite; a run of each takes about a minute on one core, see docs/comparing.md.

  :mixed    (default) the policy solves a third of the problems from the start, learns a third and cannot learn a third
  :lengths  completions with heavy-tailed lengths, and a cost of length
  :tools    products by a calculator, in two turns
  :reach    as mixed, earlier in training and with two thirds of the problems out of reach (of the suite `regimes`)

  bash scripts/setup.sh && source .venv/bin/activate
  python experiments/compare.py --suite=embedded --parallel=2 --out=runs/suite
  python experiments/train.py --config=configs/suite.py:lengths --workdir=runs/lengths
"""
from jaxrl_llm.configs import tools
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools.registry import one_of

VARIANTS = ("mixed", "lengths", "tools", "reach")


def get_config(variant: str = "mixed"):
    one_of("variant of configs/suite.py", variant, VARIANTS)
    if variant == "tools":
        return _tools(tools.get_config())
    c = default_config()
    c.model.hidden_size = 96
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 384
    c.warmup.steps = 1000
    c.warmup.batch = 64
    c.warmup.learning_rate = 3e-3
    c.optimizer.learning_rate = 3e-4
    c.eval.problems = 192
    c.eval.every = 20
    c.samples_every = 0
    return {"mixed": _mixed, "lengths": _lengths, "reach": _reach}[variant](c)


def _mixed(c):
    c.task = ("arithmetic(level=nocarry2, label=easy), arithmetic(level=nocarry3, label=middle), "
              "arithmetic(level=mul2, label=hard)")
    c.warmup.loss = 0.85
    c.steps = 150
    c.prompts.per_step = 24
    c.sampling.group = 8
    c.sampling.max_tokens = 6
    return c


def _reach(c):
    c = _mixed(c)
    c.task = ("arithmetic(level=nocarry2, label=easy), arithmetic(level=nocarry3, label=middle), "
              "arithmetic(level=mul2, label=hard, weight=4)")
    c.warmup.loss = 1.15
    c.eval.problems = 768
    return c


def _lengths(c):
    c.task = "attempts"
    c.rewards = "last_number, soft_overlong(max_length=48, cache=48, weight=0.3)"
    c.warmup.loss = 1.1
    c.steps = 100
    c.prompts.per_step = 16
    c.sampling.group = 8
    c.sampling.max_tokens = 48
    return c


def _tools(c):
    c.steps = 60
    c.eval.every = 15
    c.samples_every = 0
    return c

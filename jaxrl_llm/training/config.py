"""The keys of a run's configuration with safe defaults; config files start from here and change what they need."""
import ast
import re

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """All keys of `experiments/train.py`. Config files override values; unknown keys are errors."""
    c = ConfigDict()
    c.seed = 0
    c.steps = 100                      # rollout batches

    c.method = "grpo"                  # a row of the catalogue: python -m jaxrl_llm.methods
    c.estimator = ""                   # hyper-parameters that differ from the row's, e.g. "eps=1e-4"
    c.objective = ""                   # likewise, e.g. "kl_coef=0.01, clip_high=0.28"

    c.task = ConfigDict({"name": "arithmetic"})        # plus the task's own options
    c.rewards = ConfigDict({"last_number": {"weight": 1.0}})   # the one of largest weight is the accuracy
    c.reward_errors = "raise"          # or "zero": a failing reward scores 0 and is counted
    c.reward_deadline = 600.0          # seconds that a reward may take for one batch before the run stops

    c.model = ConfigDict()
    c.model.path = ""                  # Hugging Face directory or .gguf file; empty: from scratch with the sizes below
    c.model.tokenizer = ""             # default: the one that belongs to the path, or bytes
    c.model.hidden_size = 128
    c.model.num_layers = 4
    c.model.num_heads = 4
    c.model.mlp_size = 512
    c.model.dtype = "float32"          # of activations; weights and optimiser stay float32
    c.model.remat = False              # recompute layers in the backward pass: less memory, a third more work

    c.lora = ConfigDict({"rank": 0, "alpha": 16.0})    # rank 0: all weights are trained

    c.prompts = ConfigDict()
    c.prompts.per_step = 8             # P
    c.prompts.max_tokens = 0           # S; 0: the longest prompt of the task
    c.prompts.overlong = "fail"        # or "skip", "truncate"

    c.sampling = ConfigDict()
    c.sampling.group = 8               # G, completions per prompt
    c.sampling.max_tokens = 32         # T
    c.sampling.temperature = 1.0
    c.sampling.top_k = 0               # 0: off
    c.sampling.top_p = 1.0             # 1: off
    c.sampling.min_p = 0.0             # 0: off
    c.sampling.stop_strings = ()
    c.sampling.max_rounds = 4          # generation rounds that a filter may use to fill a batch

    c.optimizer = ConfigDict()
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup_updates = 5
    c.optimizer.schedule = "constant"  # or "linear", "cosine"
    c.optimizer.weight_decay = 0.0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    c.optimizer.clip_norm = 1.0        # 0: off

    c.learner = ConfigDict()
    c.learner.epochs = 1                # passes over each rollout batch
    c.learner.minibatches = 1           # optimiser steps per pass
    c.learner.micro_batches = 1         # parts whose gradients are summed in one optimiser step: less memory
    c.learner.max_skipped = 5           # stop after so many non-finite updates in a row

    c.warmup = ConfigDict({"steps": 0, "batch": 64, "learning_rate": 1e-3})   # supervised, on the task's own answers

    c.eval = ConfigDict({"every": 10, "problems": 64})
    c.checkpoint = ConfigDict({"every": 50, "keep": 2})
    c.samples_every = 25
    c.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})
    return c


def keywords(text: str) -> dict:
    """`"a=1, b='x'"` as a dict of Python literals; bare words are strings.

    Raises:
      ValueError: when a part is not `name=value`.
    """
    found = {}
    for part in filter(None, (p.strip(", \n") for p in re.split(r"[,\s]+(?=[A-Za-z_]\w*\s*=)", text))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
        if not name.isidentifier() or (found[name] is value and not re.fullmatch(r"[\w.+-]+", value)):
            raise ValueError(f"cannot read {part!r} in {text!r}; write hyper-parameters as name=value, name=value")
    return found


def check(config: ConfigDict) -> None:
    """Raises ValueError for values that cannot work, before anything is loaded or compiled."""
    rules = {
        "steps": config.steps >= 1, "prompts.per_step": config.prompts.per_step >= 1,
        "sampling.group": config.sampling.group >= 1, "sampling.max_tokens": config.sampling.max_tokens >= 1,
        "sampling.max_rounds": config.sampling.max_rounds >= 1,
        "learner.epochs": config.learner.epochs >= 1, "learner.minibatches": config.learner.minibatches >= 1,
        "learner.micro_batches": config.learner.micro_batches >= 1, "eval.problems": config.eval.problems >= 1,
        "lora.rank": config.lora.rank >= 0,
    }
    for name, holds in rules.items():
        if not holds:
            raise ValueError(f"config.{name} is too small: give a positive number")
    P, parts = config.prompts.per_step, config.learner.minibatches * config.learner.micro_batches
    if P % parts:
        raise ValueError(
            f"prompts.per_step={P} does not divide into learner.minibatches={config.learner.minibatches} x "
            f"learner.micro_batches={config.learner.micro_batches}; their product must be one of "
            f"{[n for n in range(1, P + 1) if P % n == 0]}")


def arithmetic_table(config: ConfigDict, prompt_tokens: int) -> list[tuple[str, str]]:
    """The batch arithmetic of a run, for people: what one step samples and how it is cut up."""
    P, G, T = config.prompts.per_step, config.sampling.group, config.sampling.max_tokens
    updates = config.learner.epochs * config.learner.minibatches
    return [
        ("prompts x completions per step", f"{P} x {G} = {P * G}"),
        ("tokens per sequence", f"prompt <= {prompt_tokens}, completion <= {T}"),
        ("updates per step", f"{config.learner.epochs} epochs x {config.learner.minibatches} minibatches = {updates}"),
        ("prompts per update", f"{P // config.learner.minibatches} in {config.learner.micro_batches} micro-batches"),
    ]

"""The keys of a run's configuration with safe defaults; config files start from here and change what they need."""
import ast
import functools
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.control.budget import UTILITIES
from jaxrl_llm.generation.prompts import OVERLONG
from jaxrl_llm.registry import one_of
from jaxrl_llm.training.optimizers import UNSET, settings_of
from jaxrl_llm.training.prior import SOURCES
from jaxrl_llm.values.critic import KINDS

OFFLOADABLE = ("optimizer", "reference")
_AT_LEAST = {
    1: "steps prompts.per_step sampling.group sampling.max_group sampling.max_tokens sampling.micro_batches "
       "sampling.max_rounds probe.pool learner.epochs learner.minibatches learner.micro_batches learner.max_skipped "
       "eval.problems checkpoint.keep warmup.batch model.hidden_size model.num_layers model.num_heads model.mlp_size "
       "model.experts_per_token",
    0: "model.experts model.expert_size learner.balance learner.packed_rows "
       "lora.rank prompts.max_tokens budget.prompts optimizer.learning_rate optimizer.warmup_updates optimizer.weight_decay "
       "optimizer.clip_norm critic.learning_rate critic.clip critic.pretrain_steps warmup.steps warmup.learning_rate "
       "eval.every checkpoint.every samples_every",
}


def default_config() -> ConfigDict:
    """All keys of `experiments/train.py`. Config files override values; unknown keys are errors."""
    c = ConfigDict()
    for room in (_run, _model, _sampling, _learning, _values, _around):
        room(c)
    return c.lock()


def _run(c: ConfigDict) -> None:
    """Keys of what is run: the seed, the method, the task and its rewards."""
    c.seed = 0
    c.steps = 100                      # rollout batches

    c.method = "grpo"                  # a row of the catalogue: python -m jaxrl_llm.methods
    c.estimator = ""                   # hyper-parameters that differ from the row's, e.g. "eps=1e-4"
    c.objective = ""                   # likewise, e.g. "kl_coef=0.01, clip_high=0.28"

    c.task = "arithmetic"              # name(option=value, ...) of a task
    c.rewards = ""                     # "boxed, format(pattern='...', weight=0.2)"; empty: the one that fits the task
    c.accuracy = ""                    # the reward that is evaluated and filtered on; empty: the one of largest weight
    c.reward_errors = "raise"          # or "zero": a failing reward scores 0 and is counted
    c.reward_deadline = 600.0          # seconds of a reward for one batch: then 0 and counted; without processes the end


def _model(c: ConfigDict) -> None:
    """Keys of the policy, its adapters and its prompts."""
    c.model = ConfigDict()
    c.model.path = ""                  # Hugging Face directory or .gguf file; empty: from scratch with the sizes below
    c.model.tokenizer = ""             # default: the one that belongs to the path, or bytes
    c.model.hidden_size = 128
    c.model.num_layers = 4
    c.model.num_heads = 4
    c.model.mlp_size = 512
    c.model.experts = 0                # of every layer, in the place of its feed-forward layer; 0: dense
    c.model.experts_per_token = 2
    c.model.expert_size = 0            # 0: mlp_size / experts_per_token, so that a token costs as much as in a dense model
    c.model.dtype = "float32"          # of activations; weights and optimiser stay float32
    c.model.remat = False              # recompute layers in the backward pass: less memory, a third more work

    c.lora = ConfigDict({"rank": 0, "alpha": 16.0})    # rank 0: all weights are trained

    c.prompts = ConfigDict()
    c.prompts.per_step = 8             # P
    c.prompts.max_tokens = 0           # S; 0: the longest prompt of the task, found by encoding all of them
    c.prompts.overlong = "fail"        # or "skip", "truncate"


def _sampling(c: ConfigDict) -> None:
    """Keys of the distribution of completions and their number."""
    c.sampling = ConfigDict()
    c.sampling.group = 8               # G, completions per prompt
    c.sampling.max_group = 16          # most of them, for methods that sample some prompts again; a multiple of group
    c.sampling.max_tokens = 32         # T
    c.sampling.temperature = 1.0
    c.sampling.top_k = 0               # 0: off
    c.sampling.top_p = 1.0             # 1: off
    c.sampling.min_p = 0.0             # 0: off
    c.sampling.stop_strings = ()
    c.sampling.micro_batches = 1       # parts of the prompts that are sampled one after another: less memory
    c.sampling.max_rounds = 4          # generation rounds that a filter may use to fill a batch


def _learning(c: ConfigDict) -> None:
    """Keys of the optimiser and the updates of a batch."""
    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"         # of optax: or "adam", "lion", "muon", "adafactor", "rmsprop", "sgd"
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup_updates = 5
    c.optimizer.schedule = "constant"  # or "linear", "cosine"
    c.optimizer.weight_decay = 0.0
    c.optimizer.b1 = -1.0              # -1: the optimiser's own, 0.9 for Adam
    c.optimizer.b2 = -1.0              # -1: the optimiser's own, 0.999 for Adam
    c.optimizer.clip_norm = 1.0        # 0: off

    c.learner = ConfigDict()
    c.learner.epochs = 0                # passes over each rollout batch; 0: the method's own
    c.learner.minibatches = 0           # optimiser steps per pass; 0: the method's own
    c.learner.micro_batches = 1         # parts whose gradients are summed in one optimiser step: less memory
    c.learner.packed_rows = 0           # rows of a micro-batch that may be smaller than a prompt's group; 0: rectangular rows
    c.learner.max_skipped = 5           # stop after so many non-finite updates in a row
    c.learner.balance = 0.0             # weight of the load-balancing loss of a mixture of experts; 0.001 to 0.01 are usual
    c.learner.offload = ""              # "optimizer", "reference" or both: in the host's memory while they are not used


def _values(c: ConfigDict) -> None:
    """Keys of values of states and expectations of prompts, for methods that have them."""
    c.probe = ConfigDict()             # read by methods whose baseline is a probe on the policy's hidden states
    c.probe.layer = "0.55"             # output of this block: its index (-1: the last), or with a point a share of the depth
    c.probe.pool = 10                  # prompt tokens and reasoning tokens, from the end, whose states are averaged
    c.probe.think_end = "</think>"     # ends the reasoning; without it all of a completion is reasoning

    c.prior = ConfigDict()             # read by methods that expect something of a prompt before they sample it
    c.prior.source = "moving_average"  # of its earlier rewards; "probe": from the policy's states; "v0"; "shuffled", "oracle"
    c.prior.weights = ""               # of V0, a file of experiments/pretrain_value.py
    c.prior.encoder = ""               # of V0, the model that it was trained with

    c.budget = ConfigDict()            # shares per_step x group completions out by what is expected of a step's prompts
    c.budget.utility = ""              # "paper" (V0), "per_rollout", "knapsack"; empty: the method's own, or all get as many
    c.budget.prompts = 0               # that a step draws and the completions are for; 0: half of per_step

    c.critic = ConfigDict()            # read by methods that fit a value to every state
    c.critic.kind = "separate"         # a second model, first a copy of the policy; "head": a layer on the policy's states
    c.critic.learning_rate = 0.0       # 0: the policy's
    c.critic.clip = 0.5                # change of a value that one batch rewards; 0: any
    c.critic.pretrain_steps = -1       # first steps that train the critic alone; -1: the method's own


def _around(c: ConfigDict) -> None:
    """Keys of what happens before and between the steps, and of the mesh."""
    c.warmup = ConfigDict({"steps": 0, "batch": 64, "learning_rate": 1e-3})   # supervised, on the task's own answers

    c.eval = ConfigDict({"every": 10, "problems": 64})
    c.checkpoint = ConfigDict({"every": 50, "keep": 2})
    c.samples_every = 25
    c.wandb = ""                       # project of Weights & Biases that is told the metrics as well
    c.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})


def keywords(text: str) -> dict[str, Any]:
    """`"a=1, b='x'"` as a dict of Python literals; bare words and paths are strings.

    Raises:
      ValueError: when a part is not `name=value`, or a name is given twice.
    """
    found = {}
    for part in parts(text):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            literal = value
        if not name.isidentifier() or name in found or (literal is value and not re.fullmatch(r"[\w.+:/~-]+", value)):
            raise ValueError(f"cannot read {part!r} in {text!r}; write options as name=value, name=value, each name once, "
                             "and text with spaces or signs in quotes")
        found[name] = literal
    return found


def calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`"exact, format(pattern='a*', weight=0.1)"` as names with their `keywords`; ValueError when it reads otherwise."""
    found = []
    for part in parts(text):
        call = re.fullmatch(r"(\w+)\s*(?:\((.*)\))?", part, re.DOTALL)
        if call is None:
            raise ValueError(f"cannot read {part!r} in {text!r}; write name, or name(option=value, option=value)")
        found.append((call[1], keywords(call[2] or "")))
    return found


def parts(text: str) -> list[str]:
    """The stretches between the commas that are in no quotes and no brackets; empty ones are left out."""
    found, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not quote and not depth:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found if part.strip()]


def resolve(config: ConfigDict, defaults: Mapping[str, Any]) -> ConfigDict:
    """A copy in which `learner.epochs` and `learner.minibatches` are numbers: where they are 0, those of `defaults`, else 1.

    A default number of minibatches that does not divide the batch becomes the largest one below it that does. Likewise
    `critic.pretrain_steps` where it is -1, else 0, `critic.learning_rate` where it is 0, `budget`, and `optimizer.b1` and `b2`
    where they are -1 and the optimiser has them. Raises ValueError for settings that it does not have.
    """
    config = config.copy_and_resolve_references()
    learner, P = config.learner, config.prompts.per_step
    learner.epochs = learner.epochs or defaults.get("epochs", 1)
    if not learner.minibatches:
        fits = (n for n in range(defaults.get("minibatches", 1), 1, -1) if P % (n * max(learner.micro_batches, 1)) == 0)
        learner.minibatches = next(fits, 1)
    budget = config.budget
    budget.utility, budget.prompts = budget.utility or defaults.get("budget", ""), budget.prompts or max(P // 2, 1)
    o = config.optimizer
    settings = settings_of(o.name, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay)
    o.b1, o.b2 = settings.get("b1", o.b1), settings.get("b2", o.b2)
    critic = config.critic
    critic.learning_rate = critic.learning_rate or config.optimizer.learning_rate
    if critic.pretrain_steps == -1:
        critic.pretrain_steps = defaults.get("pretrain_steps", 0)
    return config


def check(config: ConfigDict) -> None:
    """Raises ValueError for values that cannot work, before anything is loaded or compiled."""
    for least, names in _AT_LEAST.items():
        for name in names.split():
            value = functools.reduce(getattr, name.split("."), config)
            if not value >= least:  # refuses NaN too
                raise ValueError(f"config.{name} is {value}; it must be at least {least}")
    for name in ("b1", "b2"):
        value = config.optimizer[name]
        if value != UNSET[name] and not 0 <= value < 1:
            raise ValueError(f"config.optimizer.{name} is {value}; give 0 or more and less than 1, or -1: the optimiser's own")
    if not config.reward_deadline > 0:
        raise ValueError(f"config.reward_deadline is {config.reward_deadline}; give a number of seconds above 0")
    one_of("config.prompts.overlong", config.prompts.overlong, OVERLONG)
    for name in parts(config.learner.offload):
        one_of("config.learner.offload", name, OFFLOADABLE)
    one_of("config.critic.kind", config.critic.kind, KINDS)
    one_of("config.prior.source", config.prior.source, SOURCES)
    one_of("config.budget.utility", config.budget.utility, ("", *UTILITIES))
    if config.learner.packed_rows and config.learner.micro_batches > 1:
        raise ValueError(f"learner.packed_rows={config.learner.packed_rows} says how much is computed at a time, and so does "
                         f"learner.micro_batches={config.learner.micro_batches}; set learner.micro_batches=1")
    P, pieces = config.prompts.per_step, config.learner.minibatches * config.learner.micro_batches
    if P % config.sampling.micro_batches:
        raise ValueError(f"prompts.per_step={P} does not divide into sampling.micro_batches={config.sampling.micro_batches}; "
                         f"choose one of {[n for n in range(1, P + 1) if P % n == 0]}")
    if P % pieces:
        raise ValueError(
            f"prompts.per_step={P} does not divide into learner.minibatches={config.learner.minibatches} x "
            f"learner.micro_batches={config.learner.micro_batches}; their product must be one of "
            f"{[n for n in range(1, P + 1) if P % n == 0]}")


def arithmetic_table(config: ConfigDict, prompt_tokens: int, rounds: int = 1) -> list[tuple[str, str]]:
    """The batch arithmetic of a run, for people: what one step samples, in up to `rounds` rounds, and how it is cut up."""
    P, G, T = config.prompts.per_step, config.sampling.group, config.sampling.max_tokens
    learner, updates = config.learner, config.learner.epochs * config.learner.minibatches
    budget, most = config.budget, f" to {G * rounds} = {P * G} to {P * G * rounds}" if rounds > 1 else f" = {P * G}"
    sizes = f"{budget.prompts} x {G} to {G * rounds}, together {P * G}" if budget.utility else f"{P} x {G}{most}"
    pieces = f"{learner.packed_rows} packed rows at a time" if learner.packed_rows else f"{learner.micro_batches} micro-batches"
    return [
        ("prompts x completions per step", sizes),
        ("tokens per sequence", f"prompt <= {prompt_tokens}, completion <= {T}"),
        ("updates per step", f"{learner.epochs} epochs x {learner.minibatches} minibatches = {updates}"),
        ("prompts per update", f"{P // learner.minibatches} in {pieces}"),
    ]

"""The keys of a run's configuration with safe defaults; config files start from here and change what they need."""
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.control.budget import UTILITIES
from jaxrl_llm.engines.prompts import OVERLONG
from jaxrl_llm.engines.server.server import RELOADS
from jaxrl_llm.kernels.choice import SETS
from jaxrl_llm.learning.optimizers import UNSET, settings_of
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.sampling.prior import SOURCES
from jaxrl_llm.tools.registry import one_of
from jaxrl_llm.tools.written import calls, parts
from jaxrl_llm.values.critic import KINDS

OFFLOADABLE = ("optimizer", "reference", "teacher")
ENGINES = ("auto", "scan", "slots")
WAITS = ("auto", "yes", "no")
_AT_LEAST = {
    1: "steps prompts.per_step sampling.group sampling.max_tokens sampling.micro_batches "
       "sampling.max_turns sampling.turn_tokens "
       "sampling.max_draws probe.pool learner.epochs learner.minibatches learner.micro_batches learner.max_skipped "
       "eval.problems checkpoint.keep warmup.batch model.hidden_size model.num_layers model.num_heads model.mlp_size "
       "model.experts_per_token",
    0: "seed sampling.temperature sampling.top_k sampling.tensor sampling.observation_tokens pool.groups "
       "model.experts model.expert_size learner.balance learner.packed_rows "
       "lora.rank prompts.max_tokens sampling.max_group budget.prompts "
       "optimizer.learning_rate optimizer.warmup_updates optimizer.weight_decay "
       "optimizer.clip_norm critic.learning_rate critic.clip critic.pretrain_steps warmup.steps warmup.loss "
       "warmup.learning_rate server.max_mismatch warmup.strays eval.every checkpoint.every samples_every",
}
_FINITE = ("sampling.temperature optimizer.learning_rate optimizer.weight_decay critic.learning_rate warmup.learning_rate "
           "learner.balance")  # deadlines, ages and bounds such as clip_norm may be infinite: none


def default_config() -> ConfigDict:
    """All keys of a run. Config files override values; unknown keys are errors.

    The comment behind a key is its documentation: `setup.config_page` reads it for docs/configuration.md and `--help`.
    """
    c = ConfigDict()
    for room in (_run, _model, _sampling, _learning, _values, _around):
        room(c)
    return c.lock()


def _run(c: ConfigDict) -> None:
    """What is run: the seed, the method, the task and its rewards."""
    c.seed = 0                         # seeds new weights, the order of problems and every random draw
    c.steps = 100                      # training steps; each samples a batch of rollouts and learns from it

    c.method = "grpo"                  # name of a method; python -m jaxrl_llm.methods lists them
    c.setting = ""                     # "paper": the group size, temperature, ... of the method's paper replace those below
    c.estimator = ""                   # overrides of the advantage estimator, e.g. "eps=1e-4"
    c.objective = ""                   # overrides of the objective, e.g. "kl_coef=linear(start=0.1, end=0), clip_high=0.28"
    c.control = ""                     # overrides of the controllers, e.g. "every=50"
    c.allocation = ""                  # overrides of the rule that allocates rollouts, e.g. "weighting=hardness"
    c.guidance = ""                    # overrides of the guide, for methods that show solutions, e.g. "high=0.5"
    c.replay = ""                      # overrides of the replay buffer, for methods that have one, e.g. "capacity=512"

    c.schedule = "sync"                # "sync", "pipelined(lag=1)": sampled with weights this many batches old; module:function

    c.task = "arithmetic"              # name(option=value, ...) of jaxrl_llm.tasks or module:function; see docs/guides/data.md
    c.rewards = ""                     # e.g. "boxed, format(pattern='...', weight=0.2)"; empty: the default reward of the task
    c.score = ""                       # the reward that evaluation and filters use; empty: the one of largest weight
    c.reward_errors = "raise"          # "raise": a failing reward ends the run; "zero": it scores 0 and is counted
    c.reward_deadline = 600.0          # seconds for the rewards of a batch; then 0 and counted, or (no processes) the run ends

    c.environment = ""                 # name(option=value, ...) or module:function; brings its own task and reward
    c.environment_deadline = 30.0      # seconds for a step of an environment; a slower one invalidates its trajectory
    c.environment_waits = "auto"       # "yes": sampling goes on during its steps, "no": it stops; "auto": as it says itself
    c.environment_invalid = 0.25       # largest share of invalid trajectories in a batch; beyond it the run ends


def _model(c: ConfigDict) -> None:
    """The policy, its adapters and its prompts."""
    c.model = ConfigDict()
    c.model.path = ""                  # Hugging Face directory, .gguf file or run folder; empty: from scratch, sizes below
    c.model.tokenizer = ""             # directory or file of another tokenizer; empty: the one of model.path, or bytes
    c.model.chat_template = ""         # jinja source, or the name of a template of the tokenizer; empty: its default
    c.model.chat_template_kwargs = ""  # variables of the chat template, e.g. "enable_thinking=False"; exports have them too
    c.model.sizes = ""                 # from scratch in the sizes of a published model, e.g. "qwen2.5_1.5b"; empty: those below
    c.model.hidden_size = 128          # width of the residual stream; this and the next six keys: only from scratch
    c.model.num_layers = 4             # transformer blocks
    c.model.num_heads = 4              # attention heads; must divide hidden_size
    c.model.mlp_size = 512             # width of the feed-forward layers
    c.model.experts = 0                # experts of each layer, which replace its feed-forward layer; 0: dense
    c.model.experts_per_token = 2      # experts that each token is routed to
    c.model.expert_size = 0            # width of an expert; 0: mlp_size / experts_per_token, the cost of a dense layer
    c.model.dtype = "float32"          # dtype of activations; weights and optimiser state stay float32
    c.model.remat = False              # recompute layers in the backward pass: less memory, a third more work
    c.model.kernels = "auto"           # attention and experts: "plain" is XLA alone, "cuda", "tpu"; "auto": by the device
    c.model.int8_cache = False         # sampling keeps keys and values in 8 bits, which halves the bytes of a cache in bfloat16

    c.lora = ConfigDict()              # low-rank adapters on frozen weights
    c.lora.rank = 0                    # rank of the adapters; 0: all weights are trained
    c.lora.alpha = 16.0                # W + alpha / rank A B; the first A is normal, with standard deviation 1 / sqrt(in)

    c.prompts = ConfigDict()
    c.prompts.per_step = 8             # P, prompts of a step
    c.prompts.max_tokens = 0           # S, longest prompt in tokens; 0: of the task's longest prompt; of environments a bound
    c.prompts.overlong = "fail"        # longer prompts: "fail" ends the run, "skip" leaves them out, "truncate" cuts words


def _sampling(c: ConfigDict) -> None:
    """Completions: their number and their distribution."""
    c.sampling = ConfigDict()
    c.sampling.group = 8               # G, completions per prompt
    c.sampling.max_group = 0           # largest group of methods with unequal groups; a multiple of group; 0: four times group
    c.sampling.max_tokens = 32         # T, longest completion in tokens; in an environment: of everything after the opening
    c.sampling.max_turns = 8           # largest number of the policy's turns in a trajectory, in an environment
    c.sampling.turn_tokens = 32        # longest turn of the policy in tokens, in an environment
    c.sampling.observation_tokens = 0  # longest message of an environment in tokens; longer ones lose their middle; 0: no limit
    c.sampling.temperature = 1.0       # divides the logits
    c.sampling.top_k = 0               # samples from the k most probable tokens; 0: all
    c.sampling.top_p = 1.0             # samples from the smallest set of tokens of at least this probability; 1: all
    c.sampling.min_p = 0.0             # drops tokens below this share of the most probable token's probability; 0: none
    c.sampling.stop_strings = ()       # texts that end a completion, and belong to what rewards read; what follows them is cut
    c.sampling.micro_batches = 1       # parts of a batch that are sampled one after another; more parts need less memory
    c.sampling.engine = "auto"         # "scan", "slots", module:kind; "auto": the faster engine, see docs/guides/engine.md
    c.sampling.tensor = 0              # devices of a process over which the sampler's weights are sharded; 0: mesh.tensor
    c.sampling.paged_cache = False     # the engine's keys and values lie in pages of one pool, see docs/guides/engine.md
    c.sampling.max_draws = 4           # largest number of draws of problems by which a filter fills a batch

    c.server = ConfigDict()            # a server that samples instead of this process, see docs/guides/serving.md
    c.server.url = ""                  # its address, e.g. "http://127.0.0.1:8000"; empty: this process samples
    c.server.model = ""                # name of the model on the server; empty: its only one
    c.server.weights = ""              # folder through which it receives weights; both see it under the same path
    c.server.reload = "sglang"         # how it learns of them: by a request of "sglang" or "vllm", or from the "folder" alone
    c.server.deadline = 600.0          # seconds for a request with all its retries; beyond it the run ends
    c.server.max_mismatch = 0.05       # largest mismatch/kl of a batch, nats per token; beyond it the run ends


def _learning(c: ConfigDict) -> None:
    """The optimiser and the updates of a batch."""
    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"         # "adam", "lion", "muon", "adafactor", "rmsprop", "sgd", module:function ("optax:nadam")
    c.optimizer.learning_rate = 1e-4   # peak learning rate, reached after warmup_updates
    c.optimizer.warmup_updates = 5     # planned updates, also without a gradient, of the linear warm-up of the learning rate
    c.optimizer.schedule = "constant"  # rate after the warm-up; "linear" and "cosine" decay to 0 at the last planned update
    c.optimizer.weight_decay = 0.0     # decoupled weight decay: each update subtracts learning rate x this x weight
    c.optimizer.decayed = "all"        # weights that decay: "all", or "matrices": without norms and biases
    c.optimizer.b1 = -1.0              # decay of the first moment; -1: the optimiser's default, 0.9 for Adam
    c.optimizer.b2 = -1.0              # decay of the second moment; -1: the optimiser's default, 0.999 for Adam
    c.optimizer.momentum = 0.0         # of SGD and RMSProp: decay of the sum of updates; 0: none
    c.optimizer.clip_norm = 1.0        # gradients are scaled down to this global norm; 0: off
    c.optimizer.ema = 0.0              # decay of a moving average of the weights (adapters: of A, of B) for `--average`; 0: off

    c.learner = ConfigDict()
    c.learner.epochs = 0                # passes over each rollout batch; 0: the method's own
    c.learner.minibatches = 0           # optimiser steps per pass; 0: the method's own
    c.learner.micro_batches = 1         # gradient accumulation: parts of an update; more parts need less memory
    c.learner.packed_rows = 0           # rows of a packed micro-batch, fewer than a group if need be; 0: rectangular rows
    c.learner.max_skipped = 5           # the run ends after this number of consecutive non-finite updates
    c.learner.balance = 0.0             # weight of the load-balancing loss of a mixture of experts; 0.001 to 0.01 are usual
    c.learner.offload = ""              # kept in host memory between uses: "optimizer", "reference", "teacher"


def _values(c: ConfigDict) -> None:
    """Values of states and expectations of prompts, for methods that have them."""
    c.probe = ConfigDict()             # POISE: the baseline is a probe on the policy's hidden states
    c.probe.layer = "0.55"             # output of this block: an index (-1: the last), or a fraction of the depth
    c.probe.pool = 10                  # last prompt tokens and last reasoning tokens whose states are averaged
    c.probe.think_end = "</think>"     # text that ends the reasoning (not in a <tool_call>); without it all is reasoning

    c.prior = ConfigDict()             # methods that predict the reward of a prompt before they sample it
    c.prior.source = "moving_average"  # "moving_average" of rewards, "probe" on the policy's states, "v0", "shuffled", "oracle"
    c.prior.weights = ""               # weights of V0, from experiments/pretrain_value.py
    c.prior.encoder = ""               # the encoder that V0 was trained with

    c.teacher = ConfigDict()           # frozen teachers of distillation: log-probs of the policy's own tokens
    c.teacher.path = ""                # as model.path; for several tasks one teacher each, separated by commas
    c.teacher.base = ""                # model that teachers are compared with; empty: the initial policy

    c.pool = ConfigDict()              # groups of completions that independent runs share, as text
    c.pool.path = ""                   # folder of the pool, the same for all nodes; empty: nothing is shared
    c.pool.node = ""                   # unique name of this node; empty: the host's name and the seed
    c.pool.groups = 0                  # J, largest number of prompts per step with groups of other nodes; 0: half of per_step
    c.pool.max_age = 3600.0            # seconds after which a shared file is ignored

    c.budget = ConfigDict()            # allocates the per_step x group completions by the predicted rewards of prompts
    c.budget.utility = ""              # "paper" (of V0), "per_rollout" or "knapsack"; empty: the method's own, or equal shares
    c.budget.prompts = 0               # prompts per step that share the completions; 0: half of per_step

    c.critic = ConfigDict()            # methods with a value of each state
    c.critic.kind = "separate"         # "separate": a model initialised from the policy; "head": a layer on the policy's states
    c.critic.learning_rate = 0.0       # learning rate of the critic; 0: the policy's
    c.critic.clip = 0.5                # value clipping: largest change of a value in a batch that lowers its loss; 0: off
    c.critic.pretrain_steps = -1       # first steps that train only the critic; -1: the method's own


def _around(c: ConfigDict) -> None:
    """What happens before and between the steps, and the mesh of devices."""
    c.warmup = ConfigDict()            # supervised training on the task's own answers before the first step
    c.warmup.steps = 0                 # largest number of updates; 0: no warm-up
    c.warmup.loss = 0.0                # ends the warm-up once its last ten losses average at most this, nats per token
    c.warmup.batch = 64                # examples per update
    c.warmup.learning_rate = 1e-3      # learning rate of the warm-up
    c.warmup.strays = 0.0              # share of random turns, which are not imitated, among those of an environment's oracle

    c.eval = ConfigDict()              # evaluation on held-out problems, at the training temperature
    c.eval.every = 10                  # steps between evaluations; 0: only before and after the run
    c.eval.problems = 64               # held-out problems, each with a group of completions
    c.eval.sets = ""                   # further tasks, e.g. "dataset(..., label=aime, problems=30, samples=64, every=50)"

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 50            # steps between checkpoints; 0: only at the end
    c.checkpoint.keep = 2              # number of newest checkpoints that are kept
    c.checkpoint.best = ""             # metric, e.g. "eval/score": the weights at its maximum are kept in best/

    c.samples_every = 25               # steps between pages of completions in samples/; 0: only at evaluations
    c.wandb = ""                       # Weights & Biases project that also receives the metrics; empty: none

    c.mesh = ConfigDict()              # axis sizes; their product is the number of devices; one may be -1: the rest
    c.mesh.data = -1                   # shards prompts
    c.mesh.fsdp = 1                    # shards prompts, weights and optimiser state
    c.mesh.tensor = 1                  # shards the matrices inside layers
    c.mesh.seq = 1                     # as fsdp, and shards packed rows along the sequence


# What a row of the catalogue may say of its paper's setting -> the key that it is; the rest are parts of runs of your own.
PAPER = {"prompts": "prompts.per_step", "group_size": "sampling.group", "max_group": "sampling.max_group",
         "temperature": "sampling.temperature",
         "top_p": "sampling.top_p", "turns": "sampling.max_turns", "observation_tokens": "sampling.observation_tokens",
         "epochs": "learner.epochs", "minibatches": "learner.minibatches",
         "foreign_groups": "pool.groups", "pretrain_steps": "critic.pretrain_steps", "budget": "budget.utility"}


def as_in_paper(config: ConfigDict, defaults: Mapping[str, Any]) -> ConfigDict:
    """A copy with the paper's settings in `defaults`; `max_group` is rounded up to a multiple of the group."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({PAPER[name]: value for name, value in defaults.items() if name in PAPER})
    group = config.sampling.group
    config.sampling.max_group = -(-config.sampling.max_group // group) * group
    return config


def paper_table(config: ConfigDict, defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for the terminal: the paper's settings that differ from a resolved configuration, or that no key sets."""
    rows = []
    for name, value in defaults.items():
        key = PAPER.get(name)
        yours = None if key is None else _value(config, key)
        if yours != value:
            other = "which no key sets" if key is None else f"yours: {yours} ({key})"
            rows.append((f"{name} of the paper", f"{value}, {other}"))
    return rows


def replaced_table(config: ConfigDict, defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for the terminal: values of a configuration, as it was given, that the paper's settings replace."""
    if not config.setting:
        return []
    plain = config.copy_and_resolve_references()
    plain.setting = ""
    yours, theirs = resolve(plain, defaults), resolve(config, defaults)
    keys = {name: PAPER[name] for name in defaults if name in PAPER}
    return [(f"{name} of the paper", f"{_value(theirs, key)} ({key} was {_value(yours, key)})")
            for name, key in keys.items() if _value(theirs, key) != _value(yours, key)]


def _value(config: ConfigDict, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def resolve(config: ConfigDict, defaults: Mapping[str, Any]) -> ConfigDict:
    """A copy in which automatic values are resolved: `learner.epochs` and `minibatches` of 0 become those of `defaults`, or 1.

    With `setting="paper"` the `defaults` replace all keys that they set, see `as_in_paper`.
    A default number of minibatches that does not divide the batch becomes the largest smaller one that does. Also resolved
    are 0 or empty values of `sampling.max_group`, `critic.learning_rate`, `pool.groups` and `budget`, and values of -1 of
    `critic.pretrain_steps` (without a default 0) and, if the optimiser has them, `optimizer.b1` and `b2`. Raises ValueError for
    settings that the optimiser does not have.
    """
    one_of("config.setting", config.setting, ("", "paper"))
    config = of_one_turn(config)
    config = as_in_paper(config, defaults) if config.setting else config
    learner, P = config.learner, config.prompts.per_step
    config.sampling.max_group = config.sampling.max_group or 4 * config.sampling.group
    learner.epochs = learner.epochs or defaults.get("epochs", 1)
    if not learner.minibatches:
        fits = (n for n in range(defaults.get("minibatches", 1), 1, -1) if P % (n * max(learner.micro_batches, 1)) == 0)
        learner.minibatches = next(fits, 1)
    config.pool.groups = config.pool.groups or P // 2
    budget = config.budget
    budget.utility, budget.prompts = budget.utility or defaults.get("budget", ""), budget.prompts or max(P // 2, 1)
    o = config.optimizer
    settings = settings_of(o.name, b1=o.b1, b2=o.b2, momentum=o.momentum, weight_decay=o.weight_decay)
    o.b1, o.b2 = settings.get("b1", o.b1), settings.get("b2", o.b2)
    critic = config.critic
    critic.learning_rate = critic.learning_rate or config.optimizer.learning_rate
    if critic.pretrain_steps == -1:
        critic.pretrain_steps = defaults.get("pretrain_steps", 0)
    return config


def of_one_turn(config: ConfigDict) -> ConfigDict:
    """A copy in which the environment `single(task=..., options=..., reward=...)` is the task itself: both are one turn."""
    config, named = config.copy_and_resolve_references(), calls(config.environment)
    if [name for name, _ in named] == ["single"]:
        options = named[0][1]
        if unknown := options.keys() - {"task", "options", "reward"}:
            raise ValueError(f"config.environment={config.environment!r} sets {min(unknown)!r}; single has task, options "
                             "and reward")
        told = {**(options.get("options") or {}), **({"reward": options["reward"]} if options.get("reward") else {})}
        numbers = ", ".join(f"{name}={value!r}" for name, value in told.items())
        config.task, config.environment = f"{options.get('task', 'arithmetic')}({numbers})", ""
    return config


def check(config: ConfigDict) -> None:
    """Raises ValueError for values that cannot work, before anything is loaded or compiled."""
    _check_numbers(config)
    if config.server.url and not config.server.weights:
        raise ValueError(f"config.server.url={config.server.url!r} samples for the run, which writes weights for it; set "
                         "config.server.weights to a folder that both see")
    if config.pool.path and not 0 < config.pool.groups < config.prompts.per_step:
        raise ValueError(f"config.pool.groups={config.pool.groups} of the prompts.per_step={config.prompts.per_step} come from "
                         "the pool; give 1 or more, and leave one to this run")
    _check_sampling(config.sampling)
    _check_new_model(config.model)
    one_of("config.prompts.overlong", config.prompts.overlong, OVERLONG)
    for name in parts(config.learner.offload):
        one_of("config.learner.offload", name, OFFLOADABLE)
    one_of("config.environment_waits", config.environment_waits, WAITS)
    if ":" not in config.sampling.engine:
        one_of("config.sampling.engine", config.sampling.engine, ENGINES)
    one_of("config.server.reload", config.server.reload, RELOADS)
    one_of("config.model.kernels", config.model.kernels, SETS)
    one_of("config.model.sizes", config.model.sizes, ("", *MODELS))
    if config.model.path and config.model.sizes:
        raise ValueError(f"config.model.path={config.model.path!r} has its own sizes; set config.model.sizes only for a new "
                         "model, without a path")
    one_of("config.critic.kind", config.critic.kind, KINDS)
    one_of("config.prior.source", config.prior.source, SOURCES)
    one_of("config.budget.utility", config.budget.utility, ("", *UTILITIES))
    if config.learner.packed_rows and config.learner.micro_batches > 1:
        raise ValueError(f"learner.packed_rows={config.learner.packed_rows} and learner.micro_batches="
                         f"{config.learner.micro_batches} both set the micro-batch size; set learner.micro_batches=1")
    P, pieces = config.prompts.per_step, config.learner.minibatches * config.learner.micro_batches
    if P % config.sampling.micro_batches:
        raise ValueError(f"prompts.per_step={P} does not divide into sampling.micro_batches={config.sampling.micro_batches}; "
                         f"choose one of {[n for n in range(1, P + 1) if P % n == 0]}")
    if P % pieces:
        raise ValueError(
            f"prompts.per_step={P} does not divide into learner.minibatches={config.learner.minibatches} x "
            f"learner.micro_batches={config.learner.micro_batches}; their product must be one of "
            f"{[n for n in range(1, P + 1) if P % n == 0]}")


def _check_numbers(config: ConfigDict) -> None:
    """Raises ValueError for numbers outside their range, of which infinite ones are bounds that are never reached."""
    for least, names in _AT_LEAST.items():
        for name in names.split():
            value = _value(config, name)
            if not value >= least:  # refuses NaN too
                raise ValueError(f"config.{name} is {value}; it must be at least {least}")
    for name in _FINITE.split():
        if not np.isfinite(_value(config, name)):
            raise ValueError(f"config.{name} is {_value(config, name)}; give a finite number")
    if not 0 < config.lora.alpha < np.inf:
        raise ValueError(f"config.lora.alpha is {config.lora.alpha}; give a finite number above 0")
    for name in ("b1", "b2"):
        value = config.optimizer[name]
        if value != UNSET[name] and not 0 <= value < 1:
            raise ValueError(f"config.optimizer.{name} is {value}; give 0 or more and less than 1, or -1: the optimiser's own")
    for name in ("momentum", "ema"):
        if not 0 <= config.optimizer[name] < 1:
            raise ValueError(f"config.optimizer.{name} is {config.optimizer[name]}; give a decay below 1, for example 0.99, or "
                             "0: none")
    for name, seconds in (("reward_deadline", config.reward_deadline), ("server.deadline", config.server.deadline),
                          ("pool.max_age", config.pool.max_age),
                          ("environment_deadline", config.environment_deadline)):
        if not seconds > 0:
            raise ValueError(f"config.{name} is {seconds}; give a number of seconds above 0")
    for name in ("environment_invalid", "warmup.strays"):
        if not 0 <= _value(config, name) <= 1:
            raise ValueError(f"config.{name} is {_value(config, name)}; give a share from 0 to 1")


def _check_sampling(s: ConfigDict) -> None:
    """Raises ValueError for values of `config.sampling` that leave no text, or no distribution."""
    if not 0 < s.top_p <= 1:
        raise ValueError(f"config.sampling.top_p is {s.top_p}; give more than 0 and at most 1 (1: all tokens)")
    if not 0 <= s.min_p < 1:
        raise ValueError(f"config.sampling.min_p is {s.min_p}; give 0 or more and less than 1 (0: all tokens)")
    for text in s.stop_strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"config.sampling.stop_strings is {s.stop_strings!r}, of which {text!r} is no text that a "
                             "completion could end with; leave it out, or give a text of one character or more")


def _check_new_model(m: ConfigDict) -> None:
    """Raises ValueError for sizes of a model from scratch that do not divide."""
    if m.path or m.sizes:
        return
    if m.hidden_size % (2 * m.num_heads):
        raise ValueError(f"config.model.hidden_size is {m.hidden_size}, which config.model.num_heads={m.num_heads} do not "
                         f"share in even widths; give a multiple of {2 * m.num_heads}, or another number of heads")
    if m.experts and m.experts_per_token > m.experts:
        raise ValueError(f"config.model.experts_per_token is {m.experts_per_token} of config.model.experts={m.experts}; give "
                         "no more than there are")
    if m.experts and not m.expert_size and m.mlp_size % m.experts_per_token:
        raise ValueError(f"config.model.mlp_size is {m.mlp_size}, which config.model.experts_per_token={m.experts_per_token} "
                         "do not share evenly; give a multiple, or set config.model.expert_size")


def arithmetic_table(config: ConfigDict, prompt_tokens: int, groups: int = 1) -> list[tuple[str, str]]:
    """Rows for the terminal: the samples of one step, up to `groups` groups per prompt, and their split into batches."""
    P, G, T = config.prompts.per_step, config.sampling.group, config.sampling.max_tokens
    learner, updates = config.learner, config.learner.epochs * config.learner.minibatches
    budget, most = config.budget, f" to {G * groups} = {P * G} to {P * G * groups}" if groups > 1 else f" = {P * G}"
    sizes = f"{budget.prompts} x {G} to {G * groups}, together {P * G}" if budget.utility else f"{P} x {G}{most}"
    pieces = f"{learner.packed_rows} packed rows at a time" if learner.packed_rows else f"{learner.micro_batches} micro-batches"
    return [("prompts x completions per step", sizes), ("tokens per sequence", f"prompt <= {prompt_tokens}, completion <= {T}"),
            ("epochs x minibatches per step", f"{learner.epochs} x {learner.minibatches} = {updates}"),
            ("prompts per update", f"{P // learner.minibatches} in {pieces}")]

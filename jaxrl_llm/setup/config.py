"""The keys of a run's configuration with safe defaults; config files start from here and change what they need."""
from ml_collections import ConfigDict

from jaxrl_llm.control import budget
from jaxrl_llm.engines.server import server
from jaxrl_llm.learning import optimizers
from jaxrl_llm.methods import texts
from jaxrl_llm.models import lora
from jaxrl_llm.recorders import base as recorders
from jaxrl_llm.replay import pool
from jaxrl_llm.sampling import given, prior
from jaxrl_llm.setup import probe
from jaxrl_llm.values import critic

# Each declares the keys that it reads.
ROOMS = (texts, given, lora, server, optimizers, critic, probe, prior, recorders, pool, budget)

def default_config() -> ConfigDict:
    """All keys of a run. Config files override values; unknown keys are errors.

    The comment behind a key is its documentation: `setup.config_page` reads it for docs/configuration.md and `--help`.
    """
    c = ConfigDict()
    for declare in (_run, _model, _sampling, _learning, _around, *(room.keys for room in ROOMS)):
        declare(c)
    return c.lock()


def _run(c: ConfigDict) -> None:
    """What is run: the seed, the method, the task and its rewards."""
    c.seed = 0                         # seeds new weights, the order of problems and every random draw
    c.steps = 100                      # training steps; each learns from a batch of rollouts, which it samples, or of texts
    c.phases = ""                      # e.g. "warm(steps=50), long(sampling.max_tokens=64)"; empty: the method's own

    c.method = "grpo"                  # name of a method; python -m jaxrl_llm.methods lists them
    c.setting = ""                     # "paper": the group size, temperature, ... of the method's paper replace those below
    c.stages = ""                      # stages of your own, which act on a batch behind its rewards: "my_module:shorter"

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

    c.prompts = ConfigDict()
    c.prompts.per_step = 8             # P, prompts of a step; of sft: texts, of dpo: pairs
    c.prompts.max_tokens = 0           # S, longest prompt in tokens; 0: of the task's longest prompt; of environments a bound
    c.prompts.overlong = "fail"        # longer prompts: "fail" ends the run, "skip" leaves them out, "truncate" cuts words


def _sampling(c: ConfigDict) -> None:
    """Completions: their number and their distribution."""
    c.sampling = ConfigDict()
    c.sampling.group = 8               # G, completions per prompt
    c.sampling.max_group = 0           # largest group of methods with unequal groups; 0: four times group
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


def _learning(c: ConfigDict) -> None:
    """The optimiser and the updates of a batch."""
    c.learner = ConfigDict()
    c.learner.epochs = 0                # passes over each rollout batch; 0: the method's own
    c.learner.minibatches = 0           # optimiser steps per pass; 0: the method's own
    c.learner.micro_batches = 1         # gradient accumulation: parts of an update; more parts need less memory
    c.learner.packed_rows = 0           # rows of a packed micro-batch, fewer than a group if need be; 0: rectangular rows
    c.learner.max_skipped = 5           # the run ends after this number of consecutive non-finite updates
    c.learner.offload = ""              # kept in host memory between uses: "optimizer", "reference", "teacher"


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
    c.eval.problems = 64               # held-out problems, each with a group of completions; 0: none is sampled
    c.eval.sets = ""                   # further tasks, e.g. "dataset(..., label=aime, problems=30, samples=64, every=50)"

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 50            # steps between checkpoints; 0: only at the end
    c.checkpoint.keep = 2              # number of newest checkpoints that are kept
    c.checkpoint.best = ""             # metric, e.g. "eval/score", "-eval/loss": the weights at its maximum are kept in best/

    c.samples_every = 25               # steps between pages of completions in samples/; 0: only at evaluations
    c.wandb = ""                       # Weights & Biases project that also receives the metrics; empty: none

    c.mesh = ConfigDict()              # axis sizes; their product is the number of devices; one may be -1: the rest
    c.mesh.data = -1                   # shards prompts
    c.mesh.fsdp = 1                    # shards prompts, weights and optimiser state
    c.mesh.tensor = 1                  # shards the matrices inside layers
    c.mesh.seq = 1                     # as fsdp, and shards packed rows along the sequence

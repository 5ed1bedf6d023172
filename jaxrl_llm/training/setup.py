"""From a configuration to everything a run needs, checked before the first step."""
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import control, methods, parallel, rewards, tasks, tokenizers
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.control.budget import allocate
from jaxrl_llm.evaluation import flops
from jaxrl_llm.generation import sampling as sampling_lib
from jaxrl_llm.generation.prompts import longest
from jaxrl_llm.generation.sampler import generate
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.registry import one_of
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training import config as config_lib
from jaxrl_llm.training import prior as prior_lib
from jaxrl_llm.training import state as state_lib
from jaxrl_llm.training.guard import Guarded
from jaxrl_llm.training.optimizers import make_optimizer
from jaxrl_llm.training.policy import Capture, Policy
from jaxrl_llm.training.rollout import buckets, join, prompt_buckets, quarters_filled
from jaxrl_llm.training.step import in_parts, make_joint_update, make_update
from jaxrl_llm.values import critic as critic_lib
from jaxrl_llm.values import features

DTYPES = {"float32": np.float32, "bfloat16": jax.numpy.bfloat16}
# What this trainer records of every batch; a method that reads more is refused before anything is loaded.
RECORDED = frozenset({"rewards", "reward_components", "tokens", "prompt_tokens", "prompt_mask", "prompt_ids",
                      "behavior_logprobs", "old_logprobs", "ref_logprobs", "entropies", "policy_version",
                      "truncated", "correct", "answers", "task", "current_version", "features", "prior"})


def unpads(model: ModelConfig, slots: int) -> bool:
    """Whether leaving out the padding among so many token slots saves more than the compiling of further shapes costs.

    From 1e11 products of a token with a weight on: about a second of an update on a CPU.
    """
    return flops.matmul_parameters(model) * slots >= 1e11


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run. Functions are pure; all that changes lives in the `TrainState`."""

    config: ConfigDict
    task: tasks.Task
    tokenizer: Any
    policy: Policy
    method: methods.Method
    estimator: Estimator
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    reward: rewards.Combined
    mesh: Mesh
    prompt_tokens: int
    generate: Guarded
    score: Guarded
    capture: Guarded
    update: Guarded
    prior: prior_lib.Prior | None = None  # where the method, or a budget, asks what is expected of prompts
    joint: Guarded | None = None  # update that estimates in its own forward pass; None: capture or score comes first
    critic: critic_lib.Critic | None = None
    values: Guarded | None = None
    fit: Guarded | None = None

    @property
    def needs(self) -> set[str]:
        """Fields of `Rollouts` that the method reads beyond what every batch has."""
        return needs_of(self.method, self.estimator, self.objective)

    @property
    def updates_per_step(self) -> int:
        return self.config.learner.epochs * self.config.learner.minibatches

    @property
    def rounds(self) -> int:
        """How often a prompt may be sampled in one step: once, unless the estimator says who is sampled again."""
        return rounds_of(self.config, self.estimator)

    @property
    def readers(self) -> int:
        """Processes that read a batch of prompts together, each its share: as many as divide it."""
        return math.gcd(self.drawn_prompts, jax.process_count())

    @property
    def budget(self) -> str:
        """The utility by which the completions of a step are shared out among its prompts; empty: all get as many."""
        return self.config.budget.utility

    @property
    def drawn_prompts(self) -> int:
        """Prompts that a step draws from the task."""
        return self.config.budget.prompts if self.budget else self.config.prompts.per_step

    def shares(self, expected) -> np.ndarray:
        """i32[prompts]: how many rows of `sampling.group` completions each gets of the `prompts.per_step` of a step.

        One at least, unless the prompts are more than the rows.
        """
        unit, rows, count = self.config.sampling.group, self.config.prompts.per_step, len(expected)
        found = allocate(np.clip(expected, 0, 1), total=unit * rows, low=unit if count <= rows else 0, unit=unit,
                         high=self.config.sampling.max_group, utility=self.budget)
        return np.asarray(found) // unit

    def unpadded(self, batch: Rollouts) -> Rollouts:
        """A batch on the host, with the promise that lets the model leave its padding out, see `Rollouts.filled`."""
        c, shards = self.config, self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if not unpads(self.policy.model.config, batch.mask.size):
            return batch
        together = c.prompts.per_step // (c.learner.minibatches * c.learner.micro_batches * shards)
        return batch.replace(filled=quarters_filled(np.asarray(batch.token_mask), together))

    @property
    def feature_size(self) -> int:
        """Columns of `rollouts.features`."""
        return features.feature_size(self.policy.model.config.hidden_size)

    @property
    def pretrain_steps(self) -> int:
        """First steps, in which only the critic is trained."""
        return self.config.critic.pretrain_steps if self.critic is not None else 0

    def place(self, tree):
        """A batch on the devices: every leaf `[P, ...]` spread over the mesh by prompts."""
        return parallel.put(tree, parallel.batch_sharding(self.mesh))

    def sampler(self, params, lora, temperature: float | None = None):
        """`(prompt_tokens, prompt_mask, keys) -> Completions` under these weights."""
        s = self.config.sampling
        chosen = sampling_lib.Sampling(
            np.float32(s.temperature if temperature is None else temperature), s.top_k or None,
            s.top_p if s.top_p < 1 else None, s.min_p or None)
        sampling_lib.check(chosen)
        params = parallel.reshard(params, self.mesh, self.policy.model.dtype)

        def sample(tokens, mask, keys):
            if s.micro_batches == 1:
                return self.generate(params, *map(self.place, (tokens, mask, keys)), chosen, lora=lora)
            size, parts = len(tokens) // s.micro_batches, []
            for start in range(0, len(tokens), size):
                part = (self.place(x[start:start + size]) for x in (tokens, mask, keys))
                parts.append(parallel.fetch(self.generate(params, *part, chosen, lora=lora)))
            return jax.tree.map(join, *parts)

        return sample


def rounds_of(config: ConfigDict, estimator: Estimator) -> int:
    """Rounds of `sampling.group` completions that a prompt may get; ValueError where they do not make `sampling.max_group`."""
    if estimator.wants_more is None and not config.budget.utility:
        return 1
    group, most = config.sampling.group, config.sampling.max_group
    if most % group:
        raise ValueError(f"sampling.max_group={most} is no multiple of sampling.group={group}: prompts are sampled again "
                         f"{group} completions at a time; the paper of V0.5 has group=4 and max_group=16")
    return most // group


def check_budget(config: ConfigDict, method: methods.Method, estimator: Estimator, objective: Objective) -> None:
    """Raises ValueError where budgets cannot go together with what else decides who is sampled, or needs equal groups."""
    if not config.budget.utility:
        return
    others = [f"the filter {name!r}" for name in method.filters]
    others += ["an estimator that asks for more rollouts itself"] * (estimator.wants_more is not None)
    others += ["a baseline from hidden states"] * ("features" in needs_of(method, estimator, objective))
    others += ["a critic"] * (estimator.value_targets is not None)
    if others:
        raise ValueError(f"config.budget.utility={config.budget.utility!r} does not go together with {', '.join(others)} of "
                         f"method {method.slug!r}; leave it empty, or take another method, for example grpo")
    c, most = config, config.budget.prompts * config.sampling.max_group
    if most < c.prompts.per_step * c.sampling.group:
        raise ValueError(f"budget.prompts={c.budget.prompts} of at most sampling.max_group={c.sampling.max_group} completions "
                         f"each take {most} of the {c.prompts.per_step} x {c.sampling.group} of a step; raise one of the two")


def needs_of(method: methods.Method, estimator: Estimator, objective: Objective) -> set[str]:
    """Fields of `Rollouts`, or entries of its `extras`, that a method and its parts ask for."""
    known = [control.make_filter(name) for name in method.filters if name in control.filter_names()]
    return {*method.needs, *estimator.needs, *objective.needs, *(name for one in known for name in one.needs)}


def check_method(method: methods.Method, estimator: Estimator, objective: Objective) -> None:
    """Raises NotImplementedError when the method needs what this trainer does not record, filter or control."""
    by_critic = set() if estimator.value_targets is None else {"values"}
    missing = sorted(needs_of(method, estimator, objective) - RECORDED - by_critic)
    for name in method.filters:
        if name not in control.filter_names() or control.make_filter(name).per != "prompt":
            missing.append(f"filter {name!r}")
    missing += [f"controller {name!r}" for name in method.controllers]
    if missing:
        raise NotImplementedError(
            f"method {method.slug!r} needs {', '.join(missing)}, which this trainer does not provide; its parts can be used "
            "from your own loop, and `python -m jaxrl_llm.methods` lists the other methods")


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """A small Llama-style architecture from the sizes in `config.model`; with `experts`, a Mixtral-style one."""
    m, experts = config.model, None
    if m.experts:
        experts = Experts(m.experts, m.experts_per_token, m.expert_size or max(m.mlp_size // m.experts_per_token, 1))
    return ModelConfig(vocab_size=vocab_size, hidden_size=m.hidden_size, num_layers=m.num_layers, num_heads=m.num_heads,
                       num_kv_heads=m.num_heads, head_dim=m.hidden_size // m.num_heads,
                       mlp_size=m.mlp_size if experts is None else experts.size,  # as a Mixtral's config says it
                       experts=experts, family="llama" if experts is None else "mixtral")


def make_task(text: str) -> tasks.Task:
    """The task of `"name(option=value, ...)"`."""
    found = config_lib.calls(text)
    if len(found) != 1:
        raise ValueError(f"config.task={text!r} names {len(found)} tasks; give one of {', '.join(tasks.FACTORIES)}, with its "
                         "options in brackets, for example \"jsonl(path='problems.jsonl')\"")
    name, options = found[0]
    return tasks.make(name, **options)


def make_reward(config: ConfigDict, task: tasks.Task) -> rewards.Combined:
    """The weighted sum of `config.rewards`, or the task's own reward; the first component is the accuracy.

    Raises:
      ValueError: several rewards share the largest weight and `config.accuracy` does not say which one is the accuracy.
    """
    parts = [rewards.make(name, **options) for name, options in config_lib.calls(config.rewards) or [(task.reward, {})]]
    names = [part.name for part in parts]
    largest = [part.name for part in parts if part.weight == max(part.weight for part in parts)]
    if not config.accuracy and len(largest) > 1:
        raise ValueError(f"the rewards {', '.join(largest)} have the same weight; set config.accuracy to the name of the one "
                         "that is evaluated and filtered on")
    accuracy = one_of("reward for config.accuracy", config.accuracy or largest[0], names)
    ordered = sorted(parts, key=lambda part: part.name != accuracy)
    return rewards.combine(ordered, on_error=config.reward_errors, deadline=config.reward_deadline)


def load_model(config: ConfigDict, mesh: Mesh):
    """`(tokenizer, Transformer, params)` with the parameters laid out on the mesh; fresh ones without `model.path`."""
    m = config.model
    if m.dtype not in DTYPES:
        raise ValueError(f"model.dtype={m.dtype!r}; allowed: {', '.join(DTYPES)}")
    tokenizer = tokenizers.load(m.tokenizer or m.path or "bytes")
    if m.path:
        architecture, params = weights.load(m.path, shardings=lambda shapes: parallel.tree_shardings(shapes, mesh))
        tokenizer = tokenizer.limited_to(architecture.vocab_size)
    else:
        architecture, params = model_config(config, tokenizer.vocab_size), None
    model = Transformer(architecture, dtype=DTYPES[m.dtype], remat=m.remat)
    if params is None:
        shardings = parallel.tree_shardings(model.abstract_params(), mesh)
        params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(config.seed))
    return tokenizer, model, params


def prompt_length(config: ConfigDict, task: tasks.Task, tokenizer, max_positions: int) -> int:
    """S, the tokens that every prompt is padded to: the configured limit, or the longest prompt of the task.

    Raises:
      ValueError: prompt and completion together are longer than what a published model was made for.
    """
    S, T = config.prompts.max_tokens, config.sampling.max_tokens
    S = S or max(longest(task.train, tokenizer), longest(task.heldout, tokenizer))
    if config.model.path and S + T > max_positions:
        raise ValueError(f"prompts of up to {S} tokens and completions of up to {T} make {S + T}, but the model was made for "
                         f"{max_positions}; lower sampling.max_tokens, or prompts.max_tokens with prompts.overlong=skip")
    return S


def build(config: ConfigDict) -> tuple[Run, Any]:
    """Everything but the state; returns `(run, params)`. `run.config` has the method's own numbers filled in.

    Raises ValueError before any long work when something is off.
    """
    method = methods.get(config.method)
    config = config_lib.resolve(config, method.defaults)
    config_lib.check(config)
    T = config.sampling.max_tokens
    make_parts = functools.partial(methods.build, config.method, max_len=T, estimator=config_lib.keywords(config.estimator),
                                   objective=config_lib.keywords(config.objective))
    estimator, objective = make_parts(feature_size=features.feature_size(config.model.hidden_size))
    check_method(method, estimator, objective)
    check_budget(config, method, estimator, objective)
    rounds = rounds_of(config, estimator)
    if "features" in needs_of(method, estimator, objective) and config.sampling.group * rounds < 2:
        raise ValueError(f"method {method.slug!r} compares the completions of a prompt, but sampling.group is "
                         f"{config.sampling.group}; give 2 or more")
    if estimator.value_targets is not None and config.critic.pretrain_steps >= config.steps:
        raise ValueError(f"config.critic.pretrain_steps={config.critic.pretrain_steps} leave none of the {config.steps} steps "
                         "to the policy; set fewer (0: none), or more steps")
    task = make_task(config.task)
    reward = make_reward(config, task)
    s = config.sampling
    if "behavior_logprobs" in needs_of(method, estimator, objective) and (s.top_k or s.top_p < 1 or s.min_p):
        raise ValueError(f"method {method.slug!r} weighs tokens by learner over sampler probability; top_k, top_p and min_p "
                         "change only the latter: switch them off (0, 1, 0)")
    if "answers" in needs_of(method, estimator, objective) and reward.rewards[0].extract is None:
        raise ValueError(f"method {method.slug!r} compares the answers of the rollouts, and the reward "
                         f"{reward.rewards[0].name!r} does not tell which text is the answer; set config.accuracy to one that "
                         "does: exact, last_number, numeric, boxed or reasoning_gym")
    sampling_lib.check(sampling_lib.Sampling(config.sampling.temperature, config.sampling.top_k or None,
                                             config.sampling.top_p, config.sampling.min_p or None))
    mesh = parallel.make_mesh(**config.mesh.to_dict())
    parallel.check_batch(mesh, config.prompts.per_step, "prompts.per_step")
    parallel.check_batch(mesh, config.prompts.per_step // config.learner.minibatches // config.learner.micro_batches,
                         "prompts.per_step / learner.minibatches / learner.micro_batches")
    parallel.check_batch(mesh, config.prompts.per_step // config.sampling.micro_batches,
                         "prompts.per_step / sampling.micro_batches")
    if config.warmup.steps:
        parallel.check_batch(mesh, config.warmup.batch, "warmup.batch")
    tokenizer, model, params = load_model(config, mesh)
    if config.model.path:  # only now is the width of its states known
        estimator, objective = make_parts(feature_size=features.feature_size(model.config.hidden_size))
    if config.learner.balance and model.config.experts is None:
        raise ValueError(f"config.learner.balance={config.learner.balance} is for experts, and this model has none; "
                         "set it to 0, or take a mixture of experts")
    policy = Policy(model, temperature=config.sampling.temperature or 1.0, mesh=mesh)
    read = capture_of(config, tokenizer, model.config.num_layers)
    alone = 0 if estimator.value_targets is None else config.critic.pretrain_steps
    optimizer, schedule = optimizer_of(config, config.optimizer.learning_rate, config.steps - alone)
    update = make_update(policy, objective, optimizer, clip_norm=config.optimizer.clip_norm or None,
                         micro_batches=config.learner.micro_batches, balance=config.learner.balance)
    sampler = functools.partial(generate, model, max_tokens=T, stop_ids=stop_ids(tokenizer, config.sampling.stop_strings),
                                mesh=mesh)
    prompt_tokens = prompt_length(config, task, tokenizer, model.config.max_positions)
    sampled = len(prompt_buckets(prompt_tokens))
    shapes = len(buckets(T)) * sampled * rounds  # up to so many rows per prompt are learned from
    if unpads(model.config, config.prompts.per_step * config.sampling.group * T * rounds):
        shapes *= 4
    scored = shapes * (2 if config.lora.rank else 1)  # the reference of adapters is scored without them
    learner = config.learner  # where memory is short, scoring needs no more than an update
    parts = learner.minibatches * learner.micro_batches if learner.micro_batches > 1 else 1
    asked = config.budget.utility or "prior" in needs_of(method, estimator, objective)
    expected = prior_lib.make(config, policy, len(task.train), prompt_tokens, read) if asked else None
    capture = functools.partial(policy.logprobs_and_features, capture=read)
    joint = None
    whole = learner.epochs * learner.minibatches * learner.micro_batches == 1 and not learner.balance  # one update in one piece
    if whole and "features" in needs_of(method, estimator, objective):
        joint = Guarded("update", make_joint_update(policy, read, objective, estimator, optimizer,
                                                    clip_norm=config.optimizer.clip_norm or None), shapes)
    run = Run(config, task, tokenizer, policy, method, estimator, objective, optimizer, schedule, reward, mesh, prompt_tokens,
              generate=Guarded("rollout", sampler, sampled),
              score=Guarded("score", jax.jit(in_parts(policy.logprobs, parts)), scored),
              capture=Guarded("score", jax.jit(in_parts(capture, parts)), shapes),
              update=Guarded("update", update, shapes), prior=expected, joint=joint,
              **critic_parts(config, model, estimator, mesh, shapes))
    return run, params


def optimizer_of(config: ConfigDict, learning_rate: float, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The configured optimiser, for `steps` rollout batches at this rate, and its schedule."""
    o, learner = config.optimizer, config.learner
    return make_optimizer(learning_rate, steps * learner.epochs * learner.minibatches, name=o.name,
                          warmup_updates=o.warmup_updates, schedule=o.schedule, weight_decay=o.weight_decay, b1=o.b1, b2=o.b2)


def critic_parts(config: ConfigDict, model: Transformer, estimator: Estimator, mesh: Mesh, shapes: int) -> dict[str, Any]:
    """The fields `critic`, `values` and `fit` of a `Run`; none where the estimator asks for no critic."""
    if estimator.value_targets is None:
        return {}
    critic = critic_lib.Critic(model, optimizer_of(config, config.critic.learning_rate, config.steps)[0],
                               kind=config.critic.kind, clip=config.critic.clip or None, mesh=mesh)
    fit = critic_lib.make_update(critic, clip_norm=config.optimizer.clip_norm or None,
                                 micro_batches=config.learner.micro_batches)
    parts = config.learner.minibatches * config.learner.micro_batches
    return {"critic": critic, "values": Guarded("values", jax.jit(in_parts(critic.values, parts)), shapes),
            "fit": Guarded("update of the critic", fit, shapes)}


def capture_of(config: ConfigDict, tokenizer, num_layers: int) -> Capture:
    """What `config.probe` asks to be read of a model with `num_layers` blocks; ValueError if there is no such block."""
    p = config.probe
    try:
        layer = float(p.layer) if "." in p.layer else int(p.layer)
    except ValueError:
        raise ValueError(f"config.probe.layer={p.layer!r}; give the number of a block such as 19, or a share of the depth "
                         "such as 0.55") from None
    return Capture(features.layer_index(layer, num_layers), p.pool, tuple(tokenizer.encode(p.think_end)))


def stop_ids(tokenizer, stop_strings) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, and stop strings that are one token. Longer ones are cut afterwards."""
    single = [ids[0] for ids in map(tokenizer.encode, stop_strings) if len(ids) == 1]
    return tuple(dict.fromkeys([*tokenizer.stop_ids, *single]))


def initial_state(run: Run, params) -> state_lib.TrainState:
    """The state before the first step, laid out on the mesh."""
    config = run.config
    key = jax.random.key(config.seed)  # streams 0 to 2 are the weights', see Transformer.init
    adapters = None
    if config.lora.rank:
        adapters = lora_lib.init(jax.random.fold_in(key, 3), params, rank=config.lora.rank, alpha=config.lora.alpha)
    state = state_lib.create(params, adapters, run.optimizer, run.estimator, run.objective, jax.random.fold_in(key, 4))
    if run.critic is not None:
        state = state.replace(critic=run.critic.init(params))
    if run.prior is not None:
        state = state.replace(prior=run.prior.init())
    return parallel.put(state, parallel.tree_shardings(state, run.mesh))


def tokenizer_source(config: ConfigDict) -> Path | None:
    """The directory whose tokenizer files an exported model gets; None where the tokenizer came from no such files."""
    name = config.model.tokenizer or config.model.path or "bytes"
    path, files = Path(name).expanduser(), ("tokenizer.json", "tokenizer.model")
    directory = path.parent if path.name in files else path
    return directory if name != "bytes" and any((directory / file).is_file() for file in files) else None

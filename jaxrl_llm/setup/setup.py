"""From a configuration to a run: its source of rollouts and its learner, checked before the first step."""
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import environments, methods, parallel, recorders, rewards, tasks, topologies
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.control import Filter
from jaxrl_llm.control.passes import Shares
from jaxrl_llm.data import shapes as shapes_lib
from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.data.shapes import Ladders, row_lengths
from jaxrl_llm.engines import kinds
from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.base import Wanted
from jaxrl_llm.engines.prompts import bound, encode_problems, longest
from jaxrl_llm.environments.compiled import opening_of
from jaxrl_llm.environments.parsers import CLOSE, OPEN
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.evaluation import flops
from jaxrl_llm.learning import gradient_norms, offload, optimizers, schedules
from jaxrl_llm.learning.layouts import Layout, packed, rectangular
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.learning.step import against_sampler, jitted, make_joint_update
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.sampling import prior as prior_lib
from jaxrl_llm.sampling.dialogue import Dialogue
from jaxrl_llm.sampling.embeddings import prompt_embeddings
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.one_turn import OneTurn
from jaxrl_llm.sampling.shown_tools import describes_tools, hears_tools, warn_of_calls_left_out
from jaxrl_llm.sampling.source import Encode, Source, held_out
from jaxrl_llm.sampling.stream import Partner, Stream
from jaxrl_llm.setup import agreement, parts, refusals, teachers
from jaxrl_llm.setup import config as config_lib
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.problems import make_reward, make_sets, make_task
from jaxrl_llm.setup.start import load_model, open_model
from jaxrl_llm.setup.variants import check_there
from jaxrl_llm.tasks.loader import batches, levels_of, tasks_of
from jaxrl_llm.tools import written
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.tools.guard import Guarded
from jaxrl_llm.topologies import Topology, narrowed, oracle, refill, single
from jaxrl_llm.values import features

Reward = rewards.Combined | rewards.ByTask


class Judge(NamedTuple):
    """What rewards trajectories of a task: a `reward` of one turn, or the `runner` of an environment."""

    task: tasks.Task
    reward: Reward | None = None
    runner: Runner | None = None

    @property
    def environment(self) -> environments.Environment | None:
        """The environment, if there is one."""
        return None if self.runner is None else self.runner.environment


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a configured run. `config` has the method's numbers filled in; `needs` are the fields that it reads."""

    config: ConfigDict
    method: methods.Method
    source: Source
    learner: Learner
    learning_rate: optax.Schedule
    needs: frozenset[str]
    schedule: schedules.Schedule


def build(config: ConfigDict) -> tuple[Run, Any]:
    """Builds everything except the state; returns `(run, params)`.

    Raises ValueError or NotImplementedError for an invalid configuration before any long work.
    """
    agreement.check_code()
    config = config_lib.resolve(config, methods.get(config.method).defaults)
    config_lib.check(config)
    check_there(config.model.path)
    judge = make_judge(config)
    task = judge.task
    tokenizer, model, read_weights = open_model(config.model)
    made = parts.make_parts(config, model.config.hidden_size, task, judge.environment)
    refusals.check_method(config, made, judge.environment)
    refusals.check_balance(config, model)
    refusals.check_replays(made, model)
    schedule = make_schedule(config)
    refusals.check_lag(config, made, schedule.lag)
    sets = make_sets(config, task)
    if judge.reward is not None:
        refusals.check_reward(made, judge.reward)
    mesh = make_mesh(config)
    params, policy = read_weights(mesh, config.seed), policy_of(config, model, mesh)
    policy = dataclasses.replace(policy, replays=made.objective.replays)
    source = make_source(config, made, policy, mesh, tokenizer, judge, sets)
    agreement.check_data(task, source.data, config.eval.problems)
    learner, rate = make_learner(config, made.with_prior(source.prior), policy, source.ladders, tokenizer, task,
                                 made.reads_as_sampled and schedule.lag > 0)
    return Run(config, made.method, source, learner, rate, made.needs, schedule), params


def build_policy(config: ConfigDict, mesh: Mesh | None = None) -> tuple[ConfigDict, Policy, Source, Any]:
    """The sampling parts without a learner, on a mesh: `(config, policy, source, params)`. No method is looked up.

    None: the mesh of `config.mesh`.
    """
    config = config_lib.resolve(config, {})
    config_lib.check(config)
    check_there(config.model.path)
    judge = make_judge(config)
    mesh = sampling_mesh(config) if mesh is None else mesh
    tokenizer, model, params = load_model(config.model, mesh, config.seed)
    refusals.check_balance(config, model)
    policy = policy_of(config, model, mesh)
    return config, policy, make_plain_source(config, policy, mesh, tokenizer, judge), params


def make_schedule(config: ConfigDict) -> schedules.Schedule:
    """The schedule of `config.schedule`; ValueError unless it names one."""
    named = written.calls(config.schedule)
    if len(named) != 1:
        raise ValueError(f"config.schedule={config.schedule!r} names {len(named)} schedules; give one of "
                         f"{', '.join(schedules.SCHEDULES)}, or your own module:function, with its numbers in brackets")
    return schedules.make(named[0][0], **named[0][1])


def policy_of(config: ConfigDict, model: Transformer, mesh: Mesh) -> Policy:
    """The model at the temperature of sampling; greedy samples are scored at temperature 1."""
    return Policy(model, temperature=config.sampling.temperature or 1.0, mesh=mesh)


# --- the source -----------------------------------------------------------------------------------------------------------


def make_source(config: ConfigDict, made: Parts, policy: Policy, mesh: Mesh, tokenizer, judge: Judge,
                sets: tuple[EvalSpec, ...] = ()) -> Source:
    """The source of a run's rollouts, rewarded by `judge`."""
    plain = make_plain_source(config, policy, mesh, tokenizer, judge, sets, made.wanted, made.measured)
    read = capture_of(config, tokenizer, policy.model.config.num_layers)
    if expects(config, made):
        prior = prior_lib.make(config, policy, len(judge.task.train), plain.stream.prompt_tokens, read)
        plain = dataclasses.replace(plain, prior=prior)
    return with_topology(config, made, plain)


def make_plain_source(config: ConfigDict, policy: Policy, mesh: Mesh, tokenizer, judge: Judge,
                      sets: tuple[EvalSpec, ...] = (), wanted: Mapping[str, str] | None = None, columns: tuple[str, ...] = ()
                      ) -> Source:
    """A source that samples every prompt once, as held-out problems are, whatever the method.

    `wanted`, `columns`: see `make_stream`.
    """
    s, model, task = config.sampling, policy.model, judge.task
    shared = [one for one in sets if not config.environment and (one.max_tokens or 0) <= s.max_tokens]
    asked = task.train, task.heldout, *(one.task.heldout for one in shared)
    restricted = {one.top_p < 1 for one in sets if one.top_p is not None} - ({False} if s.top_p == 1 else set())
    make = functools.partial(make_stream, config, model, mesh, tokenizer, make_server(
        config, model.config, stop_ids(tokenizer, s.stop_strings)))
    stream = make(asked, judge, wanted, 1 + len(restricted), columns=columns)
    drawn = config.budget.prompts if config.budget.utility else config.prompts.per_step
    readers = int(np.gcd(drawn, jax.process_count()))
    sets = tuple(one if one in shared else one._replace(stream=make(
        [one.task.heldout], Judge(one.task, one.reward), max_tokens=max(one.max_tokens or 0, s.max_tokens))) for one in sets)
    return Source(task, batches(task.train, drawn, config.seed, jax.process_index() % readers, readers), stream,
                  single(config.prompts.per_step), config.prompts.per_step, s.max_tokens, mesh, config.prompts.overlong,
                  readers=readers, sizes=sizes_of(config, model.config), sets=sets, square_norms=gradient_norms.make(policy),
                  model=model)


def make_server(config: ConfigDict, model: ModelConfig, stops: Sequence[int]) -> external.Server | None:
    """The server that samples instead of this process; None if `config.server` names none. No request is sent yet."""
    c = config.server
    if not c.url:
        return None
    if parallel.several():
        raise NotImplementedError("one process asks a server; run it on one process, or leave server.url empty")
    client = external.Client(c.url, os.environ.get("JAXRL_LLM_TOKEN", ""), c.deadline)
    return external.Server(client, model, expanded(c.weights).resolve(), c.model, c.max_mismatch, c.reload, stops)


def make_stream(config: ConfigDict, model: Transformer, mesh: Mesh, tokenizer, server: external.Server | None,
                asked: Sequence[Sequence[tasks.Problem]], judge: Judge, wanted: Mapping[str, str] | None = None,
                programs: int = 1, max_tokens: int = 0, columns: tuple[str, ...] = ()) -> Stream:
    """The stream of a run.

    Args:
      server: samples if not None.
      asked: all problems to sample, those of training first; an environment opens a batch and an evaluation of them.
      judge: rewards trajectories.
      wanted: what the method asks of the engine, see `engines.base.CAN`, and what for.
      programs: kinds of distributions; evaluation sets that cut the distribution otherwise have another.
      max_tokens: T; 0: the one of training.
      columns: names of the further token columns that the method reads.
    """
    s = config.sampling
    T = max_tokens or s.max_tokens
    partner = make_partner(config, tokenizer, judge, asked, T)
    if partner.goes_on:  # an opening may cost a request to a server, so not all problems are opened before the first step
        first = batches(asked[0], min(config.prompts.per_step, len(asked[0])), config.seed).take(config.prompts.per_step)
        asked = [first, *(held_out(side, config.eval.problems) for side in asked[1:])]
    prompt_tokens = prompt_length(config, asked, tokenizer, model.config.max_positions, partner.encode, T,
                                  bound if partner.goes_on else longest)
    prompt_tokens = parallel.agree(prompt_tokens)
    partner.rest()
    stops = tuple(tokenizer.stop_ids) if partner.goes_on else stop_ids(tokenizer, s.stop_strings)
    replicas = parallel.sampler_mesh(mesh, s.tensor)
    if s.tensor:
        parallel.check_heads(replicas, model.config.num_heads, model.config.num_kv_heads)
    run = Wanted(model, replicas, tokenizer, config.prompts.per_step, s.group, 1 if partner.goes_on else s.micro_batches,
                 prompt_tokens, T, stops, tuple(s.stop_strings), programs=programs, paged=s.paged_cache, server=server,
                 columns=columns)
    several = mesh.size > 1 and not partner.goes_on and server is None
    wanted = {**(wanted or {}), **({"extend": f"environment {config.environment!r}"} if partner.goes_on else {}),
              **({"mesh": f"a mesh of {mesh.size} devices"} if several else {}),
              **({"paged": "sampling.paged_cache=True"} if s.paged_cache else {})}
    sampling = dataclasses.replace(parts.sampling_of(config), max_tokens=np.int32(T),
                                   spread=np.float32(0) if "spread" in wanted else None)
    kind = kinds.choose(s.engine, run, wanted)
    partner.columns = kind.columns
    stream = Stream(kind, partner, sampling, config.prompts.per_step, s.group, prompt_tokens, T,
                    tokenizer, stops, mesh, model.dtype, tuple(s.stop_strings), replicas)
    if parallel.several() and partner.goes_on and not stream.alone:
        raise ValueError(f"engine {kind.name!r} samples with all processes together, and each plays environments of its own; "
                         "set sampling.engine='slots', or run it on one process")
    partner.alone = stream.alone
    return stream


def make_partner(config: ConfigDict, tokenizer, judge: Judge, asked: Sequence[Sequence[tasks.Problem]], max_tokens: int
                 ) -> Partner:
    """What answers the policy: the runner of an environment, or a task whose reward scores one turn.

    Raises ValueError for a tokenizer without a chat template or with one that cannot show results of tools, an environment
    without a range of returns, and settings that only single turns support.
    """
    s, P = config.sampling, config.prompts.per_step
    if judge.runner is None:
        assert judge.reward is not None
        warn_of_calls_left_out(tokenizer, itertools.chain(*asked))
        return OneTurn(judge.reward, tokenizer, P, s.group, max_tokens, tuple(s.stop_strings))
    environment = judge.runner.environment
    if not tokenizer.chat_templates and not environment.tokens:
        raise ValueError("an environment speaks in messages, and this tokenizer has no chat template; set "
                         "config.model.chat_template to one")
    if config.prompts.overlong == "truncate":
        raise ValueError("prompts.overlong='truncate' would cut the opening of an environment; set it to 'fail' or 'skip'")
    low, high = environment.returns
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"environment {environment.name!r} has returns=({low}, {high}), and a score is the share of "
                         "the way from the lowest to the highest one; give two finite numbers, such as returns=(0.0, 1.0)")
    return Dialogue(judge.runner, P, s.group, s.max_turns, s.turn_tokens, max_tokens, tokenizer, tuple(s.stop_strings),
                    s.observation_tokens, hears_tools(tokenizer, environment), describes_tools(tokenizer, environment))


def with_topology(config: ConfigDict, made: Parts, source: Source) -> Source:
    """The source with the topology of the method, with its replay and its guide."""
    inner = make_topology(config, made, config.prompts.per_step)
    source = dataclasses.replace(source, topology=inner, replay=made.replay, sharing=parts.make_sharing(config, source.task))
    if made.estimator.has_critic:  # half of the update programs are the critic's
        source = dataclasses.replace(source, sizes=functools.partial(source.sizes, most=shapes_lib.MAX_PROGRAMS // 2))
    source = dataclasses.replace(source, guided=made.guide is not None)

    def of(prompts, inner):
        return filtered(config, made.filters, inner, source.view, prompts)

    return dataclasses.replace(source, topology=of(config.prompts.per_step, inner), fewer=lambda prompts: of(
        prompts, make_topology(config, made, prompts)))


def make_topology(config: ConfigDict, made: Parts, P: int) -> Topology:
    """The topology for P prompts that the method names, or implies by its parts; else one group per prompt."""
    group, most, estimator = config.sampling.group, config.sampling.max_group, made.estimator
    name, numbers = made.method.topology or (None, {})
    known = {"prompts": P, "group": group, "most": most, "guide": made.guide, "rule": made.rule,
             "drawn": config.budget.prompts, "utility": config.budget.utility,
             "wants": None if estimator.wants_more is None else lambda forest: wants_more(
                 estimator, group, most, *outcomes(forest, most), forest.facts.get("expected"))}
    topology = topologies.make(topologies.chosen(name, made.there), known, numbers)
    return oracle(topology, prompts=P) if expects(config, made) and config.prior.source == "oracle" else topology


def expects(config: ConfigDict, made: Parts) -> bool:
    """Whether a budget or the method reads what is expected of prompts."""
    return bool(config.budget.utility) or "prior" in made.needs


def filtered(config: ConfigDict, filters: Mapping[str, Filter], inner: Topology, view: Callable[[Forest, int], Rollouts], P: int
             ) -> Topology:
    """The topology that samples further prompts until filters keep P, and excludes prompts that other filters drop.

    `view` is the view of the `inner` topology.
    """
    of_prompts = [one for one in filters.values() if one.per == "prompt"]

    def kept_by(some, forest):
        rollouts = view(forest, 0)
        return np.logical_and.reduce([np.asarray(one.keep(rollouts))[:len(forest.problems)] for one in some])

    for refills, make in ((True, functools.partial(refill, prompts=P, attempts=config.sampling.max_draws)), (False, narrowed)):
        if chosen := [one for one in of_prompts if one.refills == refills]:
            inner = make(inner, keep=functools.partial(kept_by, chosen))
    return inner


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def wants_more(estimator: Estimator, first: int, most: int, rewards, valid, expected):
    """bool[P]: the prompts that an estimator samples again, by their `expected` rewards (None: the estimator reads none)."""
    rollouts = Rollouts(mask=valid[..., None], valid=valid, rewards=rewards, extras={"prior": expected})
    return estimator.wants_more(rollouts, first, most)


def prompt_length(config: ConfigDict, asked: Sequence[Sequence[tasks.Problem]], tokenizer, max_positions: int,
                  encode: Encode = encode_problems, max_tokens: int = 0, length: Callable[..., int] = longest) -> int:
    """S, the tokens that every prompt is padded to: the configured limit, or the `length` of the problems to sample.

    `encode` turns problems into token ids; `max_tokens`: of completions, 0: those of training.

    Raises:
      ValueError: prompt and completion together are longer than a published model allows.
    """
    S, T = config.prompts.max_tokens, max_tokens or config.sampling.max_tokens
    S = S or max(length(side, tokenizer, encode=encode) for side in asked if len(side))
    if config.model.path and S + T > max_positions:
        raise ValueError(f"prompts of up to {S} tokens and completions of up to {T} make {S + T}, but the model was made for "
                         f"{max_positions}; lower sampling.max_tokens, or prompts.max_tokens with prompts.overlong=skip")
    return S


def stop_ids(tokenizer, stop_strings) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, and stop strings of one token. Longer stop strings are cut afterwards."""
    one_token = [ids[0] for ids in map(tokenizer.encode, stop_strings) if len(ids) == 1]
    return tuple(dict.fromkeys([*tokenizer.stop_ids, *one_token]))


# --- the learner ----------------------------------------------------------------------------------------------------------


def make_learner(config: ConfigDict, made: Parts, policy: Policy, ladders: Ladders, tokenizer=None,
                 task: tasks.Task | None = None, as_sampled: bool = False) -> tuple[Learner, optax.Schedule]:
    """The learner of batches in the sizes of `ladders`, with the schedule of its learning rate; `as_sampled`: see `Learner`.

    The tokenizer and the task of the prompts are read for features, whose states end at a text, and for teachers.
    """
    c, learner, estimator, clip_norm = config, config.learner, made.estimator, config.optimizer.clip_norm or None
    alone = c.critic.pretrain_steps if estimator.has_critic else 0
    optimizer, schedule = optimizer_of(c, c.optimizer.learning_rate, c.steps - alone)
    objective = against_sampler(made.objective) if as_sampled else made.objective
    capture = capture_of(c, tokenizer, policy.model.config.num_layers) if "features" in made.needs else None
    layout = make_layout(c, objective, optimizer, policy, ladders, capture)
    filters = {name: one for name, one in made.filters.items() if one.per == "rollout"}
    once = learner.epochs * learner.minibatches * learner.micro_batches == 1 and ladders.groups == (1,)
    joint = None
    if capture is not None and once and not (learner.balance or filters or as_sampled or learner.packed_rows):  # uncut groups
        together = make_joint_update(policy, capture, made.objective, estimator, optimizer, clip_norm=clip_norm)
        joint = Guarded("update", together, ladders.programs)

    def logprobs_of(model):
        return make_layout(c, made.objective, optimizer, policy_of(c, model, policy.mesh), ladders).logprobs

    longest_text = ladders.prompt_tokens[-1] + ladders.tokens[-1]
    context = recorders.Context(
        asked=frozenset(), config=c, policy=policy, estimator=estimator, logprobs=layout.logprobs, jitted=jitted,
        guarded=lambda name, function, times=1: Guarded(name, function, times * ladders.programs),
        optimizer=lambda rate, updates=1: optimizer_of(c, rate, c.steps * updates)[0],
        loaded=teachers.loader(c, task, tokenizer, policy.mesh, longest_text, logprobs_of),
        pieces=pieces_of(c), features=layout.features, placed=layout.placed, square_norms=gradient_norms.make(policy),
        as_sampled=made.replay is not None and made.replay.as_sampled)
    offloaded = tuple(written.parts(learner.offload))
    return Learner(
        policy, estimator, make_recorders(made, context, offloaded, joint is not None, as_sampled), layout, policy.mesh,
        tuple(c.prompts.per_step * n for n in ladders.groups), c.sampling.group, joint, learner.epochs, learner.minibatches,
        alone, learner.max_skipped, offloaded, functools.partial(optimizers.metrics, c.optimizer), made.controls, filters,
        c.optimizer.ema, as_sampled, parallel.sampler_mesh(policy.mesh, c.sampling.tensor)), schedule


def make_recorders(made: Parts, context: recorders.Context, offloaded: tuple[str, ...], joint: bool,
                   as_sampled: bool = False) -> tuple[recorders.Recorder, ...]:
    """The recorders of what the method needs; a `joint` update records features itself, and sampling the old log-probs."""
    wanted = parts.recorded_needs(context.config, made.needs)
    wanted -= {*recorders.RECORDERS["features"].provides} if joint else set()
    wanted -= {"old_logprobs"} if as_sampled else set()
    asked = recorders.asked(wanted, made.there | methods.provision.SAMPLED)
    several = [recorders.make(name, context._replace(asked=frozenset(fields))) for name, fields in sorted(asked.items())]
    return tuple(one._replace(given=offload.away(offloaded, one.name, one.given)) for one in several)


def make_layout(config: ConfigDict, objective: Objective, optimizer: optax.GradientTransformation, policy: Policy,
                ladders: Ladders, capture: Capture | None = None) -> Layout:
    """Packed rows if `learner.packed_rows` sets their number per micro-batch, else rectangular ones."""
    learner = config.learner
    settings: dict[str, Any] = dict(clip_norm=config.optimizer.clip_norm or None, balance=learner.balance, capture=capture)
    if learner.packed_rows:
        lengths = row_lengths(ladders.prompt_tokens[-1], ladders.tokens[-1], config.sampling.group, policy.mesh.shape["seq"])
        return packed(policy, objective, optimizer, lengths, learner.packed_rows, **settings)
    shards = parallel.shards_of(policy.mesh.shape)
    together = config.prompts.per_step // (learner.minibatches * learner.micro_batches * shards)
    return rectangular(policy, objective, optimizer, ladders, micro_batches=learner.micro_batches,
                       parts=pieces_of(config), together=together, **settings)


def pieces_of(config: ConfigDict) -> int:
    """Number of parts in which log-probs of a batch are computed: as many as the updates have, so they need no more memory."""
    return config.learner.minibatches * config.learner.micro_batches if config.learner.micro_batches > 1 else 1


def sizes_of(config: ConfigDict, model: ModelConfig) -> Callable[[int, int, int, int], Ladders]:
    """The sizes of batches, see `data.shapes`."""
    if config.learner.packed_rows:
        return shapes_lib.limits
    slots = config.prompts.per_step * config.sampling.group * config.sampling.max_tokens
    return shapes_lib.unpadded if unpads(model, slots) else shapes_lib.padded


def unpads(model: ModelConfig, slots: int) -> bool:
    """Whether skipping the padding among this number of token slots saves more than compiling further shapes costs.

    It does from 1e11 products of a token with a weight on: about a second of an update on a CPU.
    """
    return flops.matmul_parameters(model) * slots >= 1e11


def optimizer_of(config: ConfigDict, learning_rate: float, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The configured optimiser, for `steps` rollout batches at this rate, and its schedule."""
    o, learner = config.optimizer, config.learner
    return optimizers.make_optimizer(
        learning_rate, steps * learner.epochs * learner.minibatches, name=o.name, warmup_updates=o.warmup_updates,
        schedule=o.schedule, decayed=o.decayed, weight_decay=o.weight_decay, b1=o.b1, b2=o.b2, momentum=o.momentum)


def capture_of(config: ConfigDict, tokenizer, num_layers: int) -> Capture:
    """The states that `config.probe` reads of a model with `num_layers` blocks; ValueError if there is no such block."""
    p = config.probe
    try:
        layer = float(p.layer) if "." in p.layer else int(p.layer)
    except ValueError:
        raise ValueError(f"config.probe.layer={p.layer!r}; give the number of a block such as 19, or a share of the depth "
                         "such as 0.55") from None
    marker, *call = (tuple(tokenizer.encode(text)) for text in (p.think_end, OPEN, CLOSE))
    return Capture(features.layer_index(layer, num_layers), p.pool, marker, (call[0], call[1]))


def initial_state(run: Run, params) -> TrainState:
    """The state before the first step, sharded over the mesh."""
    key = jax.random.fold_in(jax.random.key(run.config.seed), 4)
    return run.learner.init(params, initial_adapters(run.config, params), key, known_of(run, params))


def known_of(run: Run, params) -> dict[str, Any]:
    """The `control.KNOWN` values of a run; those of training prompts only if a controller needs them."""
    source, s = run.source, run.config.sampling
    train = source.task.train
    seed = jax.random.fold_in(jax.random.key(run.config.seed), 5)
    known = {"prompts": len(train), "shares": Shares(*tasks_of(train)), "batch": source.data.size, "group": s.group,
             "max_group": s.max_group, "max_tokens": s.max_tokens, "seed": jax.random.key_data(seed)}
    if "levels" in run.learner.controls.asks:
        known["levels"] = levels_of(train)
    if {"prompt_lengths", "embeddings"} & run.learner.controls.asks:
        ids = parallel.first(source.stream.partner.encode([train[i] for i in range(len(train))], source.stream.tokenizer))
        if "embeddings" in run.learner.controls.asks:
            known["embeddings"] = prompt_embeddings(run.learner.policy, params, ids, source.stream.prompt_tokens)
        known["prompt_lengths"] = np.array([len(one or ()) for one in ids], np.int32)
    return known


def initial_adapters(config: ConfigDict, params):
    """Adapters that change nothing yet; None if the weights themselves are trained."""
    key = jax.random.fold_in(jax.random.key(config.seed), 3)  # streams 0 to 2 are the weights', see Transformer.init
    return lora_lib.init(key, params, rank=config.lora.rank, alpha=config.lora.alpha) if config.lora.rank else None


# --- parts ----------------------------------------------------------------------------------------------------------------


def make_judge(config: ConfigDict) -> Judge:
    """The task of a run, and what rewards its trajectories: the runner of an environment, or a reward."""
    if config.environment:
        runner = make_runner(config)
        return Judge(runner.environment.task, runner=runner)
    task = make_task(config.task)
    return Judge(task, make_reward(config, task))


def named_environment(config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """The name and the options of `config.environment`; ValueError unless it names one."""
    named = written.calls(config.environment)
    if len(named) != 1:
        raise ValueError(f"config.environment={config.environment!r} names {len(named)} environments; give one of "
                         f"{', '.join(environments.factories())}, or your own module:function, with its options in brackets")
    return named[0]


def make_runner(config: ConfigDict) -> Runner:
    """The runner of `config.environment`: compiled, in processes or in threads.

    Environments that wait, by `config.environment_waits`, run in threads. Others are compiled for a game of arrays, use
    processes if trajectories can be replayed, else threads.
    """
    name, options = named_environment(config)
    made = environments.make(name, **options)
    waits = {"auto": made.waits, "yes": True, "no": False}[config.environment_waits]
    kind = ("threads" if waits else "compiled" if opening_of(made) is not None else
            "processes" if made.replayable else "threads")
    workers = made.at_once or config.prompts.per_step * config.sampling.group if waits else None
    return Runner(name, options, seed=config.seed, kind=kind, workers=workers, deadline=config.environment_deadline,
                  limit=config.environment_invalid, waits=waits, joint=parallel.several())


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `config.mesh`; ValueError if it cannot divide the batches of the configuration."""
    mesh, P, learner = sampling_mesh(config), config.prompts.per_step, config.learner
    parallel.check_batch(mesh, P // learner.minibatches // learner.micro_batches,
                         "prompts.per_step / learner.minibatches / learner.micro_batches")
    parallel.check_batch(mesh, learner.packed_rows, "learner.packed_rows", "rows")
    if config.warmup.steps:
        parallel.check_batch(mesh, config.warmup.batch, "warmup.batch")
    return mesh


def sampling_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `config.mesh`, for sampling alone; ValueError if it cannot divide the prompts of a step."""
    mesh, P = parallel.make_mesh(**config.mesh.to_dict()), config.prompts.per_step
    mesh = parallel.by_process(mesh) if config.sampling.tensor else mesh
    for one in {mesh, parallel.sampler_mesh(mesh, config.sampling.tensor)}:
        parallel.check_batch(one, P, "prompts.per_step")
        parallel.check_batch(one, P // config.sampling.micro_batches, "prompts.per_step / sampling.micro_batches")
    return mesh

"""From a configuration to a run: its source of rollouts and its learner, checked before the first step."""
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.methods.composition import Faults
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stages import moments
from jaxrl_llm.setup import agreement, parts, why
from jaxrl_llm.setup.check import check, faults
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.first_state import initial_adapters, known_of
from jaxrl_llm.setup.given import as_batches, make_given, with_texts
from jaxrl_llm.setup.judge import Judge, make_judge
from jaxrl_llm.setup.keys import check_values, set_key
from jaxrl_llm.setup.learners import make_learner
from jaxrl_llm.setup.meshes import make_mesh, sampling_mesh
from jaxrl_llm.setup.names import make_schedule, method_of, wrong_options
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.phases import phases_of
from jaxrl_llm.setup.problems import make_sets
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.run import Run
from jaxrl_llm.setup.sources import make_plain_source, make_source
from jaxrl_llm.setup.start import load_model, open_model, policy_of
from jaxrl_llm.setup.values import Around
from jaxrl_llm.setup.variants import check_there
from jaxrl_llm.tokenizers import Tokenizer


class Composed(NamedTuple):
    """A configuration with its automatic values resolved, and the parts of its run."""

    config: ConfigDict
    judge: Judge
    model: tuple[Tokenizer, Transformer, Callable]
    made: Parts
    schedule: schedules.Schedule
    around: Around


def build(config: ConfigDict) -> tuple[Run, Any]:
    """Builds everything except the state; returns `(run, params)`.

    Raises ValueError or NotImplementedError for an invalid configuration before any long work.
    """
    run, read = opened(config)
    return run, read()


def opened(config: ConfigDict) -> tuple[Run, Callable[[], Any]]:
    """The run, and the function that reads its weights, or makes new ones; the errors of `build`."""
    agreement.check_code()
    config, judge, opened_model, made, schedule, around = composed(config)
    why.check(config, made, around)
    (tokenizer, model, read_weights), task = opened_model, judge.task
    sets = make_sets(config, task)
    mesh = make_mesh(config)
    policy = dataclasses.replace(policy_of(config, model, mesh), replays=made.objective.replays)
    make = make_given if made.method.source == "given" else make_source
    source = make(config, made, policy, mesh, tokenizer, judge, sets, around)
    source = with_texts(config, source, tokenizer, judge) if made.texts else source
    agreement.check_data(task, source, config.eval.problems)
    made = made.with_controllers(moments.controllers(source))
    if source.topology.reads:  # under a lag sampling gives no old log-probs of what is written elsewhere
        made = made._replace(unknown=True)
    learner, rate = make_learner(as_batches(config, source), made, policy, source.ladders, tokenizer, task,
                                 made.reads_as_sampled and schedule.lag > 0)
    run = Run(config, made.method, source, learner, rate, made.needs, schedule)
    return run, functools.partial(read_weights, mesh, config.seed)


def composed(config: ConfigDict) -> Composed:
    """What a run is composed of, before anything is read or compiled; ValueError for values that cannot work."""
    config = checked(config)
    check_there(config.model.path)
    judge, opened_model = make_judge(config), open_model(config.model)
    model = opened_model[1].config
    made, schedule = parts.make_parts(config, model.hidden_size, judge.task, judge.environment), make_schedule(config)
    encode = None if judge.environment else functools.partial(encode_problem, tokenizer=opened_model[0])
    around = Around(judge.environment, model, judge.reward, schedule, judge.task, encode)
    return Composed(config, judge, opened_model, made, schedule, around)


def checked(config: ConfigDict) -> ConfigDict:
    """The configuration with its automatic values; ValueError with every name and every value that cannot work."""
    check_values(config)
    try:
        defaults = methods.get(config.method).defaults
    except ValueError:  # `method_of` reports it
        defaults = {}
    try:
        resolved, found = resolve(config, defaults), list[str]()
    except ValueError as error:
        resolved, found = config, [str(error)]
    method_of(config, [*(found or faults(resolved)), *wrong_options(resolved)])
    return resolved


def against(method: str, changes: Mapping[str, Any]) -> list[str]:
    """All that stands against a run of a method, with these keys changed, behind the name of the phase; empty: it can begin."""
    config = default_config()
    for key, value in {"method": method, **changes}.items():
        set_key(config, key, value)
    found: list[str] = []
    for phase in phases_of(config):
        try:
            config, judge, _, made, _, around = composed(phase.config)
        except ValueError as error:
            lines = error.lines if isinstance(error, Faults) else [str(error)]
        else:
            lines = why.against(config, made, around)
            if judge.runner is not None:
                judge.runner.close()
        found += [f"phase {phase.name!r}: {line}" for line in lines] if phase.name else lines
    return found


def build_policy(config: ConfigDict, mesh: Mesh | None = None) -> tuple[ConfigDict, Policy, Source, Any]:
    """The sampling parts without a learner, on a mesh: `(config, policy, source, params)`. No method is looked up.

    None: the mesh of `config.mesh`.
    """
    config = resolve(config, {})
    check(config)
    check_there(config.model.path)
    judge = make_judge(config)
    mesh = sampling_mesh(config) if mesh is None else mesh
    tokenizer, model, params = load_model(config.model, mesh, config.seed)
    policy = policy_of(config, model, mesh)
    return config, policy, make_plain_source(config, policy, mesh, tokenizer, judge), params


def initial_state(run: Run, params) -> TrainState:
    """The state before the first step, sharded over the mesh."""
    return run.learner.init(params, initial_adapters(run.config, params), initial_key(run.config), known_of(run, params))


def initial_key(config: ConfigDict) -> jax.Array:
    """The key of a run's random draws."""
    return jax.random.fold_in(jax.random.key(config.seed), 4)

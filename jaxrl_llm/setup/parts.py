"""The parts of a method with the numbers of a configuration: estimator, objective, filters, controllers, replay, rule."""
import functools
import re
import socket
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import control, methods, parallel, recorders, replay, topologies
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.advantages.turns import of_contexts
from jaxrl_llm.advantages.turns import of_environment as estimator_of_environment
from jaxrl_llm.data.turn_info import STEP
from jaxrl_llm.engines import measures
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.environments import Environment
from jaxrl_llm.learning.controls import Controls
from jaxrl_llm.methods import composition
from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.objectives.turns import of_turns as objective_of_turns
from jaxrl_llm.replay.pool import Pool, of_task
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.sharing import Sharing
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.numbers import method_parts
from jaxrl_llm.tasks import Task
from jaxrl_llm.tools import written
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.topologies import Rule
from jaxrl_llm.values import features


class Parts(NamedTuple):
    """The parts of a configured method, with their numbers.

    Attributes:
      unknown: whether trained tokens may have unknown log-probs: traces of experts, groups of a pool.
      rehearsed: estimator and objective of rollouts that are replayed in updates of their own; None: those of fresh ones.
      needs: the fields that they read; fresh_needs, rehearsed_needs: of fresh and of replayed batches alone.
      there: what a run with this configuration has for them beside `provision.sampled()`.
      filters, controls: by name.  replay, rule: None if the method has none.
      texts: whether given texts stand beside the rollouts of a batch.
    """

    method: methods.Method
    estimator: Estimator
    objective: Objective
    needs: frozenset[str]
    there: frozenset[str]
    filters: Mapping[str, control.Filter]
    controls: Controls
    replay: replay.Replay | None
    rule: Rule | None
    rehearsed: tuple[Estimator, Objective] | None = None
    texts: bool = False
    fresh_needs: frozenset[str] = frozenset()
    rehearsed_needs: frozenset[str] = frozenset()
    unknown: bool = False

    @property
    def wanted(self) -> dict[str, str]:
        """What the method asks of the engine, see `engines.base.CAN`, and what for."""
        knobs, method = self.controls.knobs, f"method {self.method.slug!r}"
        asked = {"spread": "spread" in knobs, "limits": "token_limits" in knobs, "entropies": "entropies" in self.needs}
        return {what: method for what, needed in asked.items() if needed}

    @property
    def begins(self) -> bool:
        """Whether completions may begin with trained tokens of others, such as traces of experts."""
        return begins(self.method)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the further token columns that engines measure for it."""
        return tuple(sorted(self.needs & {*measures.MEASURES}))

    @property
    def reads_as_sampled(self) -> bool:
        """Whether under a lag the ratios of the objective are those to the log-probs of sampling, for want of a correction."""
        return self.objective.reads_old and not self.objective.corrects

    def with_controllers(self, further: Mapping[str, control.Controller]) -> "Parts":
        """The parts with these controllers beside those of the method."""
        return self._replace(controls=Controls({**self.controls.by_name, **further}))


def make_parts(config: ConfigDict, hidden_size: int, task: Task | None = None, environment: Environment | None = None) -> Parts:
    """The parts of the configured method, for a model whose states have this width.

    In an environment, methods with turns, agents or games as rows read and credit the turns of trajectories, unless these have
    several contexts whose turns lack the fact `step`: contexts are then the rows. Contexts of agents are joined to trajectories
    for methods that read agents.
    """
    method = method_of(config)
    estimator, objective = method_parts(config, method, features.feature_size(hidden_size))
    around: tuple[str, ...] = ()
    if environment is not None:
        apart, contexts = environment.apart, environment.contexts
        rows = {*methods.provision.AGENTS, *(() if apart else methods.provision.TURNS)}
        if (contexts == 1 or apart or STEP in environment.facts) and {*estimator.needs} & rows:
            adapted = estimator_of_environment(estimator)
            estimator, objective = of_contexts(adapted, contexts) if apart else adapted, objective_of_turns(objective)
        around = methods.provision.of_environment(objective, environment.facts, contexts, apart)
    needs, stored = methods.provision.needs_of(method, estimator, objective), only(method, "replay")
    unknown = begins(method) or bool(config.pool.path)
    needs = measured_where_unknown(needs) if unknown else needs
    again = composition.replayed_of(method, max_len=config.sampling.max_tokens, feature_size=features.feature_size(hidden_size))
    also = methods.provision.replay_needs_of(again) if again else needs if stored is not None and stored.updates else set()
    also |= {"behavior_logprobs"} if stored is not None and stored.as_sampled else set()
    also = measured_where_unknown(also) if unknown else also
    texts = not method.source and config.texts.share > 0
    there = {*(() if task is None else task.facts), *around, *(methods.provision.BESIDE if texts else ()),
             *keys_of(config), *measures.MEASURES, *methods.provision.parts_of(method, estimator),
             *(field for one in named_stages(config) for field in one.provides)}
    return Parts(method, estimator, objective, frozenset(needs | also), frozenset(there),
                 {name: control.make_filter(name, **numbers) for name, numbers in method.parts("filters")}, controls_of(method),
                 stored, only(method, "allocation"), again, texts, frozenset(needs), frozenset(also), unknown)


def begins(method: methods.Method) -> bool:
    """Whether a topology of the method lets completions begin with trained tokens of others, see `topologies.topology`."""
    named = [*method.parts("topology"), *method.parts("guidance")]
    return any(topologies.plants(topologies.TOPOLOGIES.find(name)) for name, _ in named)


def measured_where_unknown(needs: Set[str]) -> set[str]:
    """The needs of a method some of whose tokens nobody drew: the recorder `old` measures what is unknown.

    Its log-probs count where those at writing are unknown, and its entropies for all tokens.
    """
    return {*needs, *(("old_logprobs",) if needs & {"behavior_logprobs", "entropies"} else ())}


def keys_of(config: ConfigDict) -> set[str]:
    """The keys, such as `config.teacher.path`, that a topology or a recorder is made from and that have a value."""
    needs = [kind.needs for kind in recorders.RECORDERS.values()] + [kind.needs for kind in topologies.TOPOLOGIES.values()]
    named = {need for some in needs for need in some if need.startswith("config.")}
    return {key for key in named if functools.reduce(getattr, key.split(".")[1:], config)}


def recorded_needs(config: ConfigDict, needs: Set[str]) -> set[str]:
    """The needs that recorders provide; `old_logprobs` are also read where several updates are made on a batch."""
    several = config.learner.epochs * config.learner.minibatches > 1
    return {*needs, *(("old_logprobs",) if several else ())} - methods.provision.SAMPLED


def made_recorders(config: ConfigDict, made: Parts) -> list[str]:
    """The names of the recorders that a run makes."""
    return [*recorders.asked(recorded_needs(config, made.needs), made.there | methods.provision.sampled())]


def needed_stages(config: ConfigDict, made: Parts) -> list[str]:
    """The names of the stages whose fields the method or a recorder reads, without those of `config.stages`."""
    read = made.needs | {need for name in made_recorders(config, made) for need in recorders.RECORDERS[name].needs}
    named = [stages.STAGES.find(name) for name, _ in written.calls(config.stages)]
    return [name for name, kind in stages.STAGES.items() if read & {*kind.provides} and kind not in named]


def named_stages(config: ConfigDict) -> list[stages.Stage]:
    """The stages of `config.stages`."""
    return [stages.STAGES.make(name, **numbers) for name, numbers in written.calls(config.stages)]


def only(method: methods.Method, key: str) -> Any:
    """The part that the method has under `key`; None without one."""
    return next((SLOTS[key].table.make(name, **numbers) for name, numbers in method.parts(key)), None)


def controls_of(method: methods.Method) -> Controls:
    """The controllers of a method, by name."""
    return Controls({name: control.make(name, **numbers) for name, numbers in method.parts("controllers")})


def make_sharing(config: ConfigDict, task: Task) -> Sharing | None:
    """The sharing of groups with other runs; None if `config.pool.path` is empty."""
    c = config.pool
    if not c.path:
        return None
    if parallel.several():
        raise NotImplementedError("one process reads a pool; run it on one process, or leave pool.path empty")
    node = c.node or re.sub(r"[^A-Za-z0-9_.]", "_", f"{socket.gethostname()[:40]}_{config.seed}")
    return Sharing(Pool(expanded(c.path), node, of_task(task.train), c.max_age), c.groups)


def sampling_of(config: ConfigDict) -> sampling_lib.Sampling:
    """The distribution of `config.sampling`; ValueError for values outside their range."""
    s = config.sampling
    sampling = sampling_lib.Sampling(
        np.float32(s.temperature), np.int32(s.top_k) if s.top_k else None, np.float32(s.top_p) if s.top_p < 1 else None,
        np.float32(s.min_p) if s.min_p else None, np.int32(s.max_tokens))
    sampling_lib.check(sampling)
    return sampling

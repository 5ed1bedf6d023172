"""The parts of a method with the numbers of a configuration: estimator, objective, filters, controllers, replay, rule."""
import functools
import re
import socket
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import control, methods, parallel, recorders, replay, topologies
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.advantages.turns import of_contexts
from jaxrl_llm.advantages.turns import of_environment as estimator_of_environment
from jaxrl_llm.engines import measures
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.environments import Environment
from jaxrl_llm.learning.controls import Controls
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.objectives.turns import of_turns as objective_of_turns
from jaxrl_llm.replay.pool import Pool, of_task
from jaxrl_llm.sampling.sharing import Sharing
from jaxrl_llm.setup.numbers import method_parts
from jaxrl_llm.tasks import Task
from jaxrl_llm.tools import written
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.topologies import Guide, Rule
from jaxrl_llm.values import features


class Parts(NamedTuple):
    """The parts of a configured method, with their numbers.

    Attributes:
      rehearsed: estimator and objective of rollouts that are replayed in updates of their own; None: those of fresh ones.
      needs: the fields that they read; fresh_needs, rehearsed_needs: of fresh and of replayed batches alone.
      there: what a run with this configuration has for them beside `provision.SAMPLED`.
      filters, controls: by name.  replay, rule, guide: None if the method has none.
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
    guide: Guide | None
    rehearsed: tuple[Estimator, Objective] | None = None
    fresh_needs: frozenset[str] = frozenset()
    rehearsed_needs: frozenset[str] = frozenset()

    @property
    def wanted(self) -> dict[str, str]:
        """What the method asks of the engine, see `engines.base.CAN`, and what for."""
        knobs, method = self.controls.knobs, f"method {self.method.slug!r}"
        asked = {"forced": self.guide is not None, "spread": "spread" in knobs, "limits": "token_limits" in knobs,
                 "entropies": "entropies" in self.needs}
        return {what: method for what, needed in asked.items() if needed}

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
    several contexts, which are then the rows. Contexts of agents are joined to trajectories for methods that read agents.
    """
    method = methods.get(config.method)
    estimator, objective = method_parts(config, features.feature_size(hidden_size))
    around: tuple[str, ...] = ()
    if environment is not None:
        apart, contexts = environment.apart, environment.contexts
        rows = {*methods.provision.AGENTS, *(() if apart else methods.provision.TURNS)}
        if (contexts == 1 or apart) and {*estimator.needs} & rows:
            adapted = estimator_of_environment(estimator)
            estimator, objective = of_contexts(adapted, contexts) if apart else adapted, objective_of_turns(objective)
        around = methods.provision.of_environment(objective, environment.facts, contexts, apart)
    needs, again = methods.provision.needs_of(method, estimator, objective), make_rehearsed(config, hidden_size)
    stored = make_replay(config, method)
    also = methods.provision.replay_needs_of(again) if again else needs if stored is not None and stored.updates else set()
    also |= {"behavior_logprobs"} if stored is not None and stored.as_sampled else set()
    there = {*(() if task is None else task.facts), *around, *keys_of(config), *measures.MEASURES,
             *methods.provision.parts_of(method, estimator)}
    return Parts(method, estimator, objective, frozenset(needs | also), frozenset(there),
                 {name: control.make_filter(name, **numbers) for name, numbers in method.parts("filters")},
                 controls_of(config, method),
                 stored, make_rule(config, method), make_guide(config, method), again, frozenset(needs), frozenset(also))


def make_rehearsed(config: ConfigDict, hidden_size: int) -> tuple[Estimator, Objective] | None:
    """Estimator and objective of rollouts that are replayed in updates of their own, if the method names them.

    Raises ValueError for numbers of them in the configuration, if it does not.
    """
    given = {key: written.keywords(config[f"replay_{key}"]) for key in ("estimator", "objective")}
    made = methods.build_replay(config.method, max_len=config.sampling.max_tokens,
                                feature_size=features.feature_size(hidden_size), **given)
    if made is None and any(given.values()):
        raise ValueError(f"config.replay_estimator={config.replay_estimator!r}, config.replay_objective="
                         f"{config.replay_objective!r}: method {config.method!r} has no update on replayed rollouts with parts "
                         "of its own; leave both empty")
    return made


def keys_of(config: ConfigDict) -> set[str]:
    """The keys, such as `config.teacher.path`, that a topology or a recorder is made from and that have a value."""
    needs = [kind.needs for kind in recorders.RECORDERS.values()] + [kind.needs for kind in topologies.TOPOLOGIES.values()]
    named = {need for some in needs for need in some if need.startswith("config.")}
    return {key for key in named if functools.reduce(getattr, key.split(".")[1:], config)}


def recorded_needs(config: ConfigDict, needs: Set[str]) -> set[str]:
    """The needs that recorders provide; `old_logprobs` are also read where several updates are made on a batch."""
    several = config.learner.epochs * config.learner.minibatches > 1
    return {*needs, *(("old_logprobs",) if several else ())} - methods.provision.SAMPLED


def make_replay(config: ConfigDict, method: methods.Method) -> replay.Replay | None:
    """The method's replay rule; None for a method without replay, or ValueError if `config.replay` is set."""
    return _of_row(config, method, "replay", "a replay", replay.make)


def make_sharing(config: ConfigDict, task: Task) -> Sharing | None:
    """The sharing of groups with other runs; None if `config.pool.path` is empty."""
    c = config.pool
    if not c.path:
        return None
    if parallel.several():
        raise NotImplementedError("one process reads a pool; run it on one process, or leave pool.path empty")
    node = c.node or re.sub(r"[^A-Za-z0-9_.]", "_", f"{socket.gethostname()[:40]}_{config.seed}")
    return Sharing(Pool(expanded(c.path), node, of_task(task.train), c.max_age), c.groups)


def make_rule(config: ConfigDict, method: methods.Method) -> Rule | None:
    """The rule that gives some prompts further rollouts; None without one, or ValueError if `config.allocation` is set."""
    return _of_row(config, method, "allocation", "a rule", topologies.make_rule)


def make_guide(config: ConfigDict, method: methods.Method) -> Guide | None:
    """The guide that begins completions with solutions; None without one, or ValueError if `config.guidance` is set."""
    return _of_row(config, method, "guidance", "a guide", topologies.make_guide)


def _of_row(config: ConfigDict, method: methods.Method, key: str, what: str, make: Callable[..., Any]) -> Any:
    """The part that the method's row names under `key`, with its numbers and those of the configuration's key of that name."""
    given, part = written.keywords(config[key]), method.part(key)
    if part is not None:
        return make(part.name, **{**part.numbers, **given})
    if given:
        others = [row.slug for row in methods.METHODS.values() if getattr(row, key)]
        raise ValueError(f"config.{key}={config[key]!r} changes numbers of {what}, and method {method.slug!r} has none; leave "
                         f"it empty, or take one of {', '.join(others)}")
    return None


def sampling_of(config: ConfigDict) -> sampling_lib.Sampling:
    """The distribution of `config.sampling`; ValueError for values outside their range."""
    s = config.sampling
    sampling = sampling_lib.Sampling(np.float32(s.temperature), s.top_k or None, s.top_p if s.top_p < 1 else None,
                                     s.min_p or None, np.int32(s.max_tokens))
    sampling_lib.check(sampling)
    return sampling


def controls_of(config: ConfigDict, method: methods.Method) -> Controls:
    """The controllers of a method, with the numbers of its row and of `config.control`.

    Raises ValueError for a number that no controller has, or that two have.
    """
    given, of_row = written.keywords(config.control), dict(method.parts("controllers"))
    takers = {name: control.parameters(name) for name in of_row}
    for keyword in given:
        owners = [name for name, known in takers.items() if keyword in known]
        if len(owners) != 1:
            known = "; ".join(f"{name} has {', '.join(names) or 'none'}" for name, names in takers.items())
            raise ValueError(f"config.control={config.control!r} sets {keyword}, a number of {len(owners)} controllers of "
                             f"method {method.slug!r}; set numbers of one of them ({known or 'it has no controllers'})")
    return Controls({name: control.make(name, **numbers | {key: value for key, value in given.items() if key in takers[name]})
                     for name, numbers in of_row.items()})

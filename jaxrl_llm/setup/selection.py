"""Who is sampled next and which prompts are learned from: topology, filters, replay and pool of a method."""
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import topologies
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.control import Filter
from jaxrl_llm.data import shapes as shapes_lib
from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning import gradient_norms
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.prior import Prior
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stages import Stage
from jaxrl_llm.setup import parts
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.values import Around, values_of
from jaxrl_llm.tasks import Task
from jaxrl_llm.topologies import Topology, narrowed, oracle, refill


def with_topology(config: ConfigDict, made: Parts, source: Source, policy: Policy, prior: Prior | None,
                  around: Around = Around()) -> Source:
    """The source with the topology and the stages of the method; `prior`: predicts what to expect of problems, if not None."""
    source = dataclasses.replace(source, topology=make_topology(config, made, config.prompts.per_step, around))
    kinds = 1 + made.estimator.has_critic + (made.rehearsed is not None)  # programs of updates: of the critic, of replays
    if kinds > 1:
        source = dataclasses.replace(source, sizes=functools.partial(source.sizes, most=shapes_lib.MAX_PROGRAMS // kinds))

    def fewer(prompts):
        return filtered(config, made.filters, make_topology(config, made, prompts, around), source.view, prompts)

    topology = filtered(config, made.filters, source.topology, source.view, config.prompts.per_step)
    return dataclasses.replace(source, topology=topology, stages=make_stages(config, made, policy, source.task, prior, fewer))


def make_stages(config: ConfigDict, made: Parts, policy: Policy, task: Task, prior: Prior | None,
                fewer: Callable[[int], Topology]) -> tuple[Stage, ...]:
    """The stages of a run; `fewer(prompts)` is the topology of a batch whose other prompts are mixed into it."""
    sharing = parts.make_sharing(config, task)
    return stages.chain(
        stages.measure(gradient_norms.make(policy), prior is not None and prior.successes),
        expects=[*([] if prior is None else [stages.expect(prior)]),
                 *map(stages.STAGES.make, parts.needed_stages(config, made))],
        shapes=[*([stages.guide()] if made.begins else []),
                *parts.named_stages(config)],
        mixes=([stages.share(sharing, fewer)] if sharing is not None else
               [] if made.replay is None else
               [stages.rehearse(made.replay, config.prompts.per_step)] if made.replay.updates else
               [stages.mix(made.replay, fewer)]))


def make_topology(config: ConfigDict, made: Parts, P: int, around: Around = Around()) -> Topology:
    """The topology for P prompts that the method names, or implies by its parts; else one group per prompt.

    It may take every value of `setup.values.values_of`, and `wants(forest) -> bool[P] or i32[P]`, the prompts that the method's
    estimator samples again.
    """
    group, most, estimator = config.sampling.group, config.sampling.max_group, made.estimator
    name, numbers = made.method.part("topology") or (None, {})
    known = {**values_of(config, made, around), "prompts": P, "group": group, "most": most}
    if estimator.wants_more is not None:
        known["wants"] = lambda forest: wants_more(
            estimator, group, most, *outcomes(forest, most), forest.facts.get("expected"))
    topology = topologies.make(name, made.there, known, numbers, made.method.parts("guidance"))
    return oracle(topology, prompts=P, group=group) if expects(config, made) and config.prior.source == "oracle" else topology


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
    """bool[P] or i32[P]: which prompts an estimator samples again, or how often, by their `expected` rewards, if it reads them.
    """
    rollouts = Rollouts(mask=valid[..., None], valid=valid, rewards=rewards, extras={"prior": expected})
    return estimator.wants_more(rollouts, first, most)

"""Further rollouts for the prompts that need more: V0.5 (arXiv 2603.10848), Reinforce-Ada (arXiv 2510.04996), `rules`."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import groups
from jaxrl_llm.topologies.base import Plan, Topology, asked, everyone, group_sizes, topology
from jaxrl_llm.topologies.rules import Rule


@topology(needs=("estimator.wants_more",), takes={"wants": "wants"})
def rounds(prompts: int, *, group: int, most: int, wants: Callable[[Forest], np.ndarray],
           choose: Callable[[Forest], np.ndarray] = everyone) -> Topology:
    """`prompts` problems with `group` rollouts each, then as many as `wants` decides, up to `most`.

    `wants(forest) -> i64[P] or bool[P]`: the number of rollouts each prompt gets next, a group where it is True; zero for all
    ends the batch. Rollouts that an environment lost count in `most`, and a prompt that lost all its first ones gets no other.
    """
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        number, requested = np.arange(len(forest.problems)), asked(forest)
        if not requested.any():
            return Plan(acts=groups(number, group))
        room = np.where(group_sizes(forest) > 0, most - requested, 0)
        if not room.any():
            return Plan()
        more = np.asarray(wants(forest))
        return Plan(acts=groups(number, np.minimum(more * group if more.dtype == bool else more, room)))

    return Topology(plan, choose, most)


def chances(forest: Forest, seed: int = 0) -> np.ndarray:
    """f64[P] in [0, 1): a random number of each prompt, by the seed of the run and the uid of its first trajectory.

    A resumed run draws the same.
    """
    first = np.full(len(forest.problems), np.iinfo(np.int64).max)
    np.minimum.at(first, forest.prompt[forest.ends], forest.uid[forest.ends])
    return np.array([np.random.default_rng([seed, int(uid)]).random() for uid in first])


_IN_PARTS = Conflict(
    ("rule", "filters.refills"), "the allocation rule of method {method!r} reads {0.reads[0]}, which is measured of a whole "
    "batch, and the filter {1!r} draws a batch in several parts", "leave one of the two out",
    lambda rule, filters: rule.reads and filters)


@topology(needs=("method.allocation",), conflicts=(_IN_PARTS,), takes={"rule": "rule", "seed": "config.seed"})
def by_rule(prompts: int, *, group: int, most: int, rule: Rule, seed: int = 0) -> Topology:
    """`rounds` in which a rule decides the further rollouts of each prompt, after its pilot or a first group.

    `seed`: of the random numbers of rules that draw some.
    """
    first = rule.pilot or group

    def seen(forest):
        if rule.solved:
            forest = forest.with_columns(rewards=forest.solved.astype(np.float32))
        return outcomes(forest, most)

    def wants(forest):
        known = {name: forest.facts[name] for name in rule.reads} | ({"chance": chances(forest, seed)} if rule.draws else {})
        return np.asarray(rule.more(*seen(forest), first, most, **known), np.int64)

    def plan(forest):
        missing = [name for name in rule.reads if len(forest.ends) and name not in forest.facts]
        return Plan(measure=missing[0]) if missing else inner.plan(forest)

    def choose(forest):
        return everyone(forest) if rule.keep is None else np.asarray(rule.keep(*seen(forest)))

    inner = rounds(prompts, group=first, most=most, wants=wants, choose=choose)
    return inner._replace(plan=plan)

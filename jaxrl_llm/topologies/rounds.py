"""Further groups for the prompts that need more: V0.5 (arXiv 2603.10848), Reinforce-Ada (arXiv 2510.04996), `rules`."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.base import Plan, Topology, asked, everyone, group_sizes, groups_of, topology
from jaxrl_llm.topologies.rules import Rule


@topology(needs=("estimator.wants_more",))
def rounds(prompts: int, *, group: int, most: int, wants: Callable[[Forest], np.ndarray],
           choose: Callable[[Forest], np.ndarray] = everyone, first: int = 1) -> Topology:
    """`prompts` problems with `first` groups of `group` each, then groups as `wants` decides, up to `most` completions.

    `wants(forest) -> bool[P] or i64[P]`: the number of groups each prompt gets next; zero for all ends the batch. Completions
    that an environment lost count in `most`, and a prompt that lost all of its first groups gets no other.

    Raises ValueError if `most` is not a multiple of `group`.
    """
    most_groups = groups_of(most, group, f"prompts are sampled again {group} completions at a time; the paper of V0.5 has "
                            "group=4 and max_group=16")

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        number = np.arange(len(forest.problems))
        requested = asked(forest)
        if not requested.any():
            return Plan(rows=np.repeat(number, first))
        room = np.where(group_sizes(forest) > 0, (most - requested) // group, 0)
        return Plan(rows=np.repeat(number, np.minimum(wants(forest), room))) if room.any() else Plan()

    return Topology(plan, choose, max_groups=most_groups)


_IN_PARTS = Conflict(
    ("rule", "filters.refills"), "the allocation rule of method {method!r} reads {0.reads[0]}, which is measured of a whole "
    "batch, and the filter {1!r} draws a batch in several parts", "leave one of the two out",
    lambda rule, filters: rule.reads and filters)


@topology(needs=("method.allocation",), conflicts=(_IN_PARTS,))
def by_rule(prompts: int, *, group: int, most: int, rule: Rule) -> Topology:
    """`rounds` in which a rule decides the further rollouts of each prompt, rounded up to whole groups.

    Raises ValueError if the pilot of the rule is not a multiple of `group`.
    """
    if rule.pilot % group:
        raise ValueError(f"pilot={rule.pilot} rollouts are no multiple of sampling.group={group}, the completions that are "
                         "sampled at once; give a multiple, or sampling.group=1 for single rollouts")
    first, own = rule.pilot or group, {"group": group} if rule.pilot else {}

    def seen(forest):
        if rule.solved:
            forest = forest.with_columns(rewards=forest.solved.astype(np.float32))
        return outcomes(forest, most)

    def wants(forest):
        more = np.asarray(rule.more(*seen(forest), first, most, **own, **{name: forest.facts[name] for name in rule.reads}))
        return -(-more // group)

    def plan(forest):
        missing = [name for name in rule.reads if len(forest.ends) and name not in forest.facts]
        return Plan(measure=missing[0]) if missing else inner.plan(forest)

    def choose(forest):
        return everyone(forest) if rule.keep is None else np.asarray(rule.keep(*seen(forest)))

    inner = rounds(prompts, group=group, most=most, wants=wants, choose=choose, first=first // group)
    return inner._replace(plan=plan)

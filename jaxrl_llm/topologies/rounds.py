"""Further groups for the prompts that want more: V0.5 (arXiv 2603.10848), Reinforce-Ada (arXiv 2510.04996)."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.forest import Forest
from jaxrl_llm.topologies.base import Plan, Topology, everyone, group_sizes


def rounds(prompts: int, *, group: int, most: int, wants: Callable[[Forest], np.ndarray]) -> Topology:
    """`prompts` problems with a group of `group` each, then again for those where `wants(forest) -> bool[P]`, up to `most`.

    Raises ValueError where groups do not make `most`.
    """
    if most % group:
        raise ValueError(f"sampling.max_group={most} is no multiple of sampling.group={group}: prompts are sampled again "
                         f"{group} completions at a time; the paper of V0.5 has group=4 and max_group=16")

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        largest = group_sizes(forest).max()
        if not largest:
            return Plan(rows=np.arange(len(forest.problems)))
        return Plan(rows=np.flatnonzero(wants(forest))) if largest < most else Plan()

    return Topology(plan, everyone, max_groups=most // group)

"""As many groups for each prompt as a controller says before the draw (`control.Settings.group_sizes`)."""
import numpy as np

from jaxrl_llm.topologies.base import Plan, Topology, everyone


def sized(prompts: int, *, group: int, most: int) -> Topology:
    """`prompts` problems with `facts["group_size"]` i32[P] rollouts each, rounded up to whole groups, from one to `most`.

    Raises ValueError where groups do not make `most`.
    """
    if most % group:
        raise ValueError(f"sampling.max_group={most} is no multiple of sampling.group={group}: prompts are sampled "
                         f"{group} completions at a time")

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        if len(forest.ends):
            return Plan()
        counts = np.clip(-(-forest.facts["group_size"] // group), 1, most // group)
        return Plan(rows=np.repeat(np.arange(len(forest.problems)), counts))

    return Topology(plan, everyone, max_groups=most // group)

"""As many groups for each prompt as its budget says: V0 (arXiv 2602.03584), Knapsack RL (arXiv 2509.25849)."""
import numpy as np

from jaxrl_llm.control.budget import allocate
from jaxrl_llm.topologies.base import Plan, Topology, group_sizes


def budgets(prompts: int, *, rows: int, group: int, most: int, utility: str) -> Topology:
    """`rows` groups shared out among `prompts` problems by what is expected of them, `facts["expected"]` f32[P].

    Each prompt gets one at least, unless the prompts are more than the rows, and at most `most` completions. Raises ValueError
    where groups do not make `most`.
    """
    if most % group:
        raise ValueError(f"sampling.max_group={most} is no multiple of sampling.group={group}: budgets are shared out "
                         f"{group} completions at a time")

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        if len(forest.ends):
            return Plan()
        counts = allocate(np.clip(forest.facts["expected"], 0, 1), total=group * rows, unit=group, high=most, utility=utility,
                         low=group if len(forest.problems) <= rows else 0)
        return Plan(rows=np.repeat(np.arange(len(forest.problems)), np.asarray(counts) // group))

    return Topology(plan, lambda forest: group_sizes(forest) > 0, max_groups=most // group)

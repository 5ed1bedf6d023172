"""As many groups for each prompt as its budget says: V0 (arXiv 2602.03584), Knapsack RL (arXiv 2509.25849)."""
import numpy as np

from jaxrl_llm.control.budget import allocate
from jaxrl_llm.topologies.base import Topology, drawn_at_once, group_sizes, groups_of


def budgets(prompts: int, *, rows: int, group: int, most: int, utility: str) -> Topology:
    """`rows` groups shared out among `prompts` problems by what is expected of them, `facts["expected"]` f32[P].

    Each prompt gets one at least, unless the prompts are more than the rows, and at most `most` completions. Raises ValueError
    where groups do not make `most`.
    """
    most_groups = groups_of(most, group, f"budgets are shared out {group} completions at a time")

    def counts(forest):
        found = allocate(np.clip(forest.facts["expected"], 0, 1), total=group * rows, unit=group, high=most, utility=utility,
                         low=group if len(forest.problems) <= rows else 0)
        return np.asarray(found) // group

    return drawn_at_once(prompts, counts, lambda forest: group_sizes(forest) > 0, most_groups)

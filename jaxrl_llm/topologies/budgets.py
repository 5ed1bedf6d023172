"""A number of groups for each prompt by a budget: V0 (arXiv 2602.03584), Knapsack RL (arXiv 2509.25849)."""
import numpy as np

from jaxrl_llm.control.budget import allocate
from jaxrl_llm.topologies.base import Topology, drawn_at_once, group_sizes, groups_of, topology


@topology(needs=("config.budget.utility",))
def budgets(drawn: int, *, prompts: int, group: int, most: int, utility: str) -> Topology:
    """`prompts` groups allocated to `drawn` problems by their expected success rates, `facts["expected"]` f32[P].

    Each problem gets at least one group, unless there are more of them than groups, and at most `most` completions. Raises
    ValueError if `most` is not a multiple of `group`.
    """
    most_groups = groups_of(most, group, f"budgets are shared out {group} completions at a time")

    def counts(forest):
        budget = allocate(np.clip(forest.facts["expected"], 0, 1), total=group * prompts, unit=group, high=most,
                          utility=utility, low=group if len(forest.problems) <= prompts else 0)
        return np.asarray(budget) // group

    return drawn_at_once(drawn, counts, lambda forest: group_sizes(forest) > 0, most_groups)

"""A number of rollouts for each prompt by a budget: V0 (arXiv 2602.03584), Knapsack RL (arXiv 2509.25849)."""
import numpy as np

from jaxrl_llm.control.budget import LEAST, allocate
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.base import Topology, drawn_at_once, group_sizes, topology


def _all_taken(drawn: int, most: int, prompts: int, group: int) -> str:
    """Why a budget leaves nothing to decide; "": it leaves something."""
    if drawn * most > prompts * group:
        return ""
    return (f"budget.prompts={drawn} of at most sampling.max_group={most} completions each take {drawn * most} of the "
            f"{prompts} x {group} of a step, which leaves nothing to allocate")


_OTHERS = {"filters": "the filter {1!r}", "estimator.wants_more": "an estimator that asks for more rollouts itself",
           "needs.features": "a baseline from hidden states", "estimator.has_critic": "a critic"}
_CONFLICTS = (
    *(Conflict(("config.budget.utility", name), f"config.budget.utility={{0!r}} does not go together with {what} of method "
               "{method!r}", "leave it empty, or take another method, for example grpo") for name, what in _OTHERS.items()),
    Conflict(("config.budget.prompts", "config.sampling.max_group", "config.prompts.per_step", "config.sampling.group"),
             _all_taken, "raise one of the two"))


@topology(needs=("config.budget.utility",), conflicts=_CONFLICTS,
          takes={"drawn": "config.budget.prompts", "utility": "config.budget.utility"})
def budgets(drawn: int, *, prompts: int, group: int, most: int, utility: str) -> Topology:
    """`prompts` x `group` rollouts allocated to `drawn` problems by their expected success rates, `facts["expected"]` f32[P].

    Each problem gets at least two, unless the rollouts are too few for that, and at most `most`.
    """
    total = prompts * group

    def counts(forest):
        low = min(LEAST, most) if LEAST * len(forest.problems) <= total else 0
        return np.asarray(allocate(np.clip(forest.facts["expected"], 0, 1), total=total, low=low, high=most, utility=utility))

    return drawn_at_once(drawn, counts, lambda forest: group_sizes(forest) > 0, most)

"""Groups in which some completions begin with the problem's solution, or a part of it."""
from typing import Any

import numpy as np

from jaxrl_llm.data.forest import outcomes
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.base import Plan, Topology, asked, everyone, topology
from jaxrl_llm.topologies.guides import Guide


def _alone(guide: Guide, group: int) -> str:
    """Why the shares of a guide leave no completion to the policy; "": they leave some."""
    try:
        guide.first(group)
    except ValueError as error:
        return str(error)
    return ""


def _unsolved(environment: Any, guide: Guide) -> str:
    """Why trajectories of an environment cannot begin as an expert would; "": they can."""
    for problem in environment.task.train if environment.oracle is None else ():
        if "solution" not in problem.extra:
            return (f"a guide begins trajectories as an expert would, and environment {environment.name!r} has neither an "
                    f"oracle nor a solution of problem {problem.id}")
    return ""


_CONFLICTS = (
    Conflict(("guide", "config.budget.utility"), "method {method!r} begins completions with solutions of a task, and this run "
             "samples with a budget", "leave that out, or take another method, for example grpo"),
    Conflict(("environment", "guide"), _unsolved,
             "give it an oracle, or its problems an extra['solution'], or take another method, for example grpo"),
    Conflict(("guide", "config.sampling.top_k", "config.sampling.top_p", "config.sampling.min_p"),
             "method {method!r} takes log-probs of solutions, which top_k, top_p and min_p cut away",
             "switch them off (0, 1, 0)", lambda guide, top_k, top_p, min_p: top_k or top_p < 1 or min_p),
    Conflict(("guide", "config.sampling.group"), _alone, "raise sampling.group, or change config.guidance"))


@topology(needs=("method.guidance",), provides=("expert", "hinted", "hint_mask"), conflicts=_CONFLICTS)
def guided(prompts: int, *, group: int, guide: Guide) -> Topology:
    """`prompts` problems with a group of `group` each, and a second group if the `guide` has shares for it.

    The uids of a prompt's first group seed its random share, which depends on nothing else in the batch.
    """
    first = guide.first(group)

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        rows = np.arange(len(forest.problems))
        if not asked(forest).any():
            return Plan(rows=rows, shares=np.tile(first, (len(rows), 1)))
        if guide.second is None or asked(forest).max() > group:
            return Plan()
        uids, prompts_of = forest.uid[forest.ends], forest.prompt[forest.ends]
        normal = [np.random.default_rng(uids[prompts_of == row].tolist()).standard_normal() for row in rows]
        shares = guide.second(*outcomes(forest, group), np.array(normal, np.float32))
        return Plan(rows=rows, shares=np.repeat(shares[:, None], group, axis=1))

    return Topology(plan, everyone, max_groups=1 if guide.second is None else 2)

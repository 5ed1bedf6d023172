"""Groups in which some completions begin with the problem's solution, or a part of it."""
import numpy as np

from jaxrl_llm.data.forest import outcomes
from jaxrl_llm.topologies.base import Plan, Topology, asked, everyone, topology
from jaxrl_llm.topologies.guides import Guide


@topology(needs=("method.guidance",), provides=("expert", "hinted", "hint_mask"))
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

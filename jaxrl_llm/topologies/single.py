"""One group of completions for every prompt."""
import numpy as np

from jaxrl_llm.topologies.base import Plan, Topology, asked, everyone, topology


@topology
def single(prompts: int) -> Topology:
    """`prompts` problems with one group each."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        return Plan() if asked(forest).any() else Plan(rows=np.arange(len(forest.problems)))

    return Topology(plan, everyone)

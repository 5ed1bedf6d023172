"""What to expect of problems, asked of the policy itself: a control condition for priors, which have to predict it."""
import numpy as np

from jaxrl_llm.topologies.acts import groups
from jaxrl_llm.topologies.base import Plan, Topology


def oracle(inner: Topology, *, prompts: int, group: int, draws: int = 4) -> Topology:
    """`inner`, once the expected rewards of drawn problems, `facts["expected"]` f32[P], are known: NaN where they are not yet.

    They are mean rewards of `draws` batches of `prompts` groups, shared out evenly, which are not trained on.
    """
    def plan(forest):
        unknown = np.flatnonzero(np.isnan(forest.facts["expected"])) if forest.problems else ()
        if len(unknown):
            return Plan(acts=groups(np.resize(unknown, prompts * draws), group), measure="expected")
        return inner.plan(forest)

    return inner._replace(plan=plan)

"""A number of groups for each prompt that a controller sets before the draw (`control.Settings.group_sizes`)."""
import numpy as np

from jaxrl_llm.topologies.base import Topology, drawn_at_once, everyone, groups_of, topology


@topology(needs=("group_sizes",))
def sized(prompts: int, *, group: int, most: int) -> Topology:
    """`prompts` problems with `facts["group_size"]` i32[P] rollouts each, rounded up to whole groups, from one to `most`.

    Raises ValueError if `most` is not a multiple of `group`.
    """
    most_groups = groups_of(most, group, f"prompts are sampled {group} completions at a time")

    def counts(forest):
        return np.clip(-(-forest.facts["group_size"] // group), 1, most_groups)

    return drawn_at_once(prompts, counts, everyone, most_groups)

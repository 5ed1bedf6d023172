"""A number of rollouts for each prompt that a controller sets before the draw (the knob `group_sizes`)."""
import numpy as np

from jaxrl_llm.topologies.base import Topology, drawn_at_once, everyone, topology


@topology(needs=("group_sizes",))
def sized(prompts: int, *, most: int) -> Topology:
    """`prompts` problems with `facts["group_size"]` i32[P] rollouts each, from one to `most`."""
    return drawn_at_once(prompts, lambda forest: np.clip(forest.facts["group_size"], 1, most), everyone, most)

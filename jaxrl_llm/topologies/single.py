"""One group of completions for every prompt."""
from jaxrl_llm.topologies.base import Topology, drawn_at_once, everyone, topology


@topology
def single(prompts: int, *, group: int) -> Topology:
    """`prompts` problems with `group` completions each."""
    return drawn_at_once(prompts, lambda forest: group, everyone)

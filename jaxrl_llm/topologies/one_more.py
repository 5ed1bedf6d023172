"""A rollout more than a group, of which the estimator leaves one out of the loss: MC-GRPO (arXiv 2601.22582)."""
from jaxrl_llm.topologies.base import Topology, drawn_at_once, everyone, topology


@topology
def one_more(prompts: int, *, group: int) -> Topology:
    """`prompts` problems with `group` + 1 completions each; after an estimator that drops one, updates have whole groups."""
    return drawn_at_once(prompts, lambda forest: group + 1, everyone, group + 1)._replace(at_once=group + 1)

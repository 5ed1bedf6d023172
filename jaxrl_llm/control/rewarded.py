"""Only rollouts with a reward are learned from, as by a topology that gives it to the chosen ones alone (arXiv 2507.16814)."""
from jaxrl_llm.control.base import Filter, prompt_filter


@prompt_filter
def rewarded() -> Filter:
    """Rollouts with a reward above 0."""
    return Filter(lambda rollouts: rollouts.valid & (rollouts.rewards > 0), needs=("rewards",), per="rollout")

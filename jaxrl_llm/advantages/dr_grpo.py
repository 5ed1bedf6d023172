"""Dr. GRPO: the group-centred reward, without division by the group's standard deviation (arXiv 2503.20783).

The method's other half divides each response by the generation budget instead of its own length: the objective's
`aggregation="fixed_length"`.
"""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


@estimator
def dr_grpo() -> Estimator:
    """`A_i = r_i - mean` over the valid rollouts of each prompt; a group of one gets 0."""
    return stateless(lambda rollouts: rollouts.rewards - masked.group_mean(rollouts.rewards, rollouts.valid))

"""LUFFY's advantage: expert traces are in the group and are scored like the policy's own rollouts (arXiv 2504.14945)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.data.experts import expert_rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def luffy(*, baseline: str = "all", use_std: bool = False, eps: float = 1e-6) -> Estimator:
    """`A_i = r_i - b`, b the mean reward of the prompt's valid rollouts, expert traces included.

    `baseline="on_policy"` takes b (and the deviation) from the policy's own rollouts only. `use_std` divides by their
    sample standard deviation + eps, a deviation of 0 counting as 1. If b would be the mean of fewer than two rollouts,
    it is 0. All-equal groups get exactly 0. eps as in `grpo`.
    """
    registry.one_of("baseline", baseline, ("all", "on_policy"))

    def advantages(rollouts):
        members = rollouts.valid
        if baseline == "on_policy":
            members = members & ~expert_rollouts(rollouts)
        centred = rollouts.rewards - masked.unless_alone(masked.group_mean(rollouts.rewards, members), members)
        if not use_std:
            return centred
        deviation = masked.group_std(rollouts.rewards, members, ddof=1)
        return centred / (jnp.where(deviation == 0, 1, deviation) + eps)

    return stateless(advantages, needs=("rewards", "expert") if baseline == "on_policy" else ("rewards",))

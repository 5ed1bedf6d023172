"""MC-GRPO: centre a small group on its median, which flips fewer advantage signs than the mean (arXiv 2601.22582)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.control.mc_grpo import lower_median, without_pivot
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

ZERO = 1e-6


@estimator
def mc_grpo(*, scale: str = "mad", compensate: bool = True) -> Estimator:
    """`A = (r - med) / s`, times `n / #{A != 0}` with `compensate`; med is the lower median of the prompt's n rollouts.

    `scale`: `mad` s = lower median of |r - med| + 1e-3 (the published code), `std` s = sample std + 1e-4, `none` s = 1.
    With 0/1 rewards the MAD is 0 as soon as one value has the majority, and `mad` gives advantages in the thousands,
    which only clipping of the gradient norm limits: prefer `std` there. One rollout of each prompt, the first with the median
    reward, only serves the median: it is not trained on (`jaxrl_llm.control.mc_grpo.without_pivot`). The topology `one_more`
    samples it beside the group. The paper's abstract names only the median; MAD and compensation are its code's.
    """
    registry.one_of("scale", scale, ("mad", "std", "none"))

    def advantages(rollouts, state):
        rewards, valid = rollouts.rewards, rollouts.valid
        centred = rewards - lower_median(rewards, valid)
        if scale == "mad":
            centred = centred / (lower_median(jnp.abs(centred), valid) + 1e-3)
        elif scale == "std":
            centred = centred / (masked.group_std(rewards, valid, ddof=1) + 1e-4)
        return (over_kept(centred, jnp.abs(centred) > ZERO, valid, axis=1) if compensate else centred), state

    return stateful(lambda: (), advantages, keeps=lambda rollouts: without_pivot(rollouts.rewards, rollouts.valid))

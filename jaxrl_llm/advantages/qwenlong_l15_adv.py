"""QwenLong-L1.5: normalised by the group's mean and the whole task's standard deviation (arXiv 2512.12967)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def task_std(rewards_PG: Array, valid_PG: Array, task_P: Array, *, ddof: int) -> Array:
    """[P, 1]: standard deviation of all valid rewards of prompts with the same task id i32[P]."""
    P, G = rewards_PG.shape
    same = (task_P[:, None] == task_P[None, :])[:, :, None] & valid_PG[None]
    everyone = jnp.broadcast_to(rewards_PG[None], (P, P, G))
    return masked.std(everyone, same, axis=(1, 2), ddof=ddof)[:, None]


@estimator
def qwenlong_l15_adv(*, scope: str = "task", eps: float = 1e-6, ddof: int = 1) -> Estimator:
    """`A = (r - group mean) / (std + eps)`, std over all rewards of the batch with the same `extras["task"]` i32[P].

    `scope` widens or narrows the std to the `batch` or the `group` (the ablations), which need no task ids. Tasks with
    0/1 and with dense rewards thus get updates of one size. An all-equal group has A = 0. The report does not give the
    kind of std and eps. The entropy gate on negative rollouts and the balanced sampling of tasks are separate.
    """
    registry.one_of("scope", scope, ("task", "batch", "group"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        if scope == "task":
            std = task_std(rewards, valid, rollouts.extras["task"], ddof=ddof)
        else:
            std = masked.std(rewards, valid, axis=1 if scope == "group" else None, ddof=ddof, keepdims=True)
        return (rewards - masked.group_mean(rewards, valid)) / (std + eps)

    return stateless(advantages, needs=("rewards", "task") if scope == "task" else ("rewards",))

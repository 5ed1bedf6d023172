"""RAPO of Fathom-Search: groups with a signal are scaled up to make up for groups without (arXiv 2509.24107)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.maths import masked


@estimator
def rapo(*, max_scale: float | None = None) -> Estimator:
    """`A = (r - mean) / std * n_groups / n_good`, with the group's population std; good groups have std > 0.

    Other groups get A = 0. Groups without a valid rollout do not count. The factor n_groups / n_good keeps the size of
    the update independent of the number of all-equal groups; `max_scale` bounds it. Two parts of the method act before
    the advantage: a stored success enters groups in which all failed (`jaxrl_llm.replay.latest_success`), and solved
    prompts are excluded from later epochs (`jaxrl_llm.control.pass_rate`).
    """

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        std = masked.group_std(rewards, valid, ddof=0)
        good, real = std > 0, jnp.any(valid, axis=1, keepdims=True)
        scores = (rewards - masked.group_mean(rewards, valid)) / jnp.where(good, std, 1)
        scaled = over_kept(scores, good, real)
        if max_scale is None:
            return scaled
        bound = max_scale * jnp.abs(scores)
        return jnp.clip(scaled, -bound, bound)

    return stateless(advantages)

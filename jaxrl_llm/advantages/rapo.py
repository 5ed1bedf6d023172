"""RAPO of Fathom-Search: groups with a signal are scaled up to make up for groups without (arXiv 2509.24107)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.maths import masked
from jaxrl_llm.rewards.call_kinds import COUNTS, step_reward


@estimator
def rapo(*, max_scale: float | None = None, steps: bool = False) -> Estimator:
    """`A = (r - mean) / std * n_groups / n_good`, with the group's population std; good groups have std > 0.

    Other groups get A = 0. Groups without a valid rollout do not count. The factor n_groups / n_good keeps the size of
    the update independent of the number of all-equal groups; `max_scale` bounds it. With `steps` r is the `step_reward` of the
    kinds of calls, the paper's second stage; a trajectory with a malformed call has no right format. Two parts of the method
    act before the advantage: a stored success enters groups in which all failed (`jaxrl_llm.replay.latest_success`), and solved
    prompts are excluded from later epochs (`jaxrl_llm.control.pass_rate`). Extras with `steps`: i32[P, G] of
    `rewards.call_kinds.COUNTS`, `malformed` bool[P, G].
    """
    def rewarded(rollouts):
        counts = (rollouts.extras[name] for name in COUNTS)
        return step_reward(rollouts.correct.astype(jnp.float32), 1.0 - rollouts.extras["malformed"], *counts)

    def advantages(rollouts):
        rewards, valid = rewarded(rollouts) if steps else rollouts.rewards, rollouts.valid
        std = masked.group_std(rewards, valid, ddof=0)
        good, real = std > 0, jnp.any(valid, axis=1, keepdims=True)
        scores = (rewards - masked.group_mean(rewards, valid)) / jnp.where(good, std, 1)
        scaled = over_kept(scores, good, real)
        if max_scale is None:
            return scaled
        bound = max_scale * jnp.abs(scores)
        return jnp.clip(scaled, -bound, bound)

    return stateless(advantages, needs=("rewards", *COUNTS, "malformed") if steps else ("rewards",))

"""HGPO: turns compared in nested groups that share longer and longer histories (arXiv 2602.22817)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry


@estimator
def hgpo(*, memory: int = 2, alpha: float = 1.0, weight_offset: int = 1, gamma: float = 0.95, mode: str = "mean_std_norm",
         base_group: bool = False, eps: float = 1e-6) -> Estimator:
    """`A = sum_k w_k A_k / (sum_k w_k + eps)`, `w_k = (k + weight_offset)^alpha`, over the levels k = 0..`memory`.

    A_k compares the returns `R_t = step_rewards_t + gamma * R_{t+1}` of turns of the task whose last k + 1 states
    agree, with the population std (`mode="mean_std_norm"`) or centred only (`mean_norm`). Levels that do not exist (no
    partner, fewer than k turns before) or carry no signal (|A_k| <= 1e-6) are skipped and the weights renormalised;
    without any level the advantage is 0. The paper's weights have offset 1, its public code's 2; memory (2 or
    4) and alpha are the paper's, gamma and eps as in `gigpo`. `base_group` adds the episode advantage of `gigpo`
    (from `rewards`) as one more term of weight 1.
    Extras: `step_rewards` f32[P, G]; `traj`, `step`, `obs` i32[P, G].
    """
    registry.one_of("mode", mode, segments.MODES)

    def advantages(rollouts):
        valid, traj, step = rollouts.valid, rollouts.extras["traj"], rollouts.extras["step"]
        returns = segments.discounted_return(rollouts.extras["step_rewards"], valid, traj, step, gamma=gamma)
        before, has_before = segments.previous(valid, traj, step)

        levels = []
        state, defined, group = rollouts.extras["obs"], valid, segments.same(valid)
        for k in range(memory + 1):
            group &= segments.same(defined, state)
            levels.append(((k + weight_offset) ** alpha, segments.relative(returns, group, mode=mode, eps=eps, ddof=0)))
            state = jnp.take_along_axis(state, before, axis=1)
            defined = has_before & jnp.take_along_axis(defined, before, axis=1)
        if base_group:
            score, task = segments.by_trajectory(rollouts.rewards, valid, traj)
            levels.append((1.0, segments.relative(score, task, mode=mode, eps=eps, singleton="raw")))

        weights = [jnp.where(jnp.abs(level) > 1e-6, weight, 0.0) for weight, level in levels]
        return sum(w * level for w, (_, level) in zip(weights, levels)) / (sum(weights) + eps)

    needs = ("step_rewards", "traj", "step", "obs")
    return stateless(advantages, needs=("rewards", *needs) if base_group else needs)

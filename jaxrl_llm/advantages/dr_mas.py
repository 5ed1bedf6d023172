"""Dr. MAS: every agent of a multi-agent system is normalised with its own mean and deviation (arXiv 2602.08847)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry

VARIANTS = ("agent", "vanilla", "agent_mean", "agent_std")


@estimator
def dr_mas(*, variant: str = "agent", eps: float = 1e-6, singleton: str = "raw") -> Estimator:
    """`A = (r - mean) / (std + eps)`, sample std, for agent calls as rows on the G axis.

    `variant`:
      `agent`       statistics of all calls of the same agent in the task
      `vanilla`     GRPO of trajectories: r = mean over the trajectory's calls, each trajectory counts once
      `agent_mean`  mean of the agent, std of the trajectories
      `agent_std`   mean of the trajectories, std of the agent
    Under `vanilla` the second moment of agent k's advantages is `(std_k^2 + (mean_k - mean)^2) / std^2`, which grows
    when agents differ; under `agent` it is 1. A group of one keeps its raw reward, or gets 0 with `singleton="zero"`. The
    two mixed variants give 0 where their std is 0, because the mean of the other kind can differ from the reward there.
    eps and `singleton` are the published code's.
    `rewards` [P, G]: the trajectory's reward plus the call's own terms. Extras i32[P, G]: `agent`, and `traj` except under
    the variant `agent`.
    """
    registry.one_of("variant", variant, VARIANTS)
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def by_agent(rollouts):
        agent = segments.same(rollouts.valid, rollouts.extras["agent"])
        return segments.relative(rollouts.rewards, agent, eps=eps, singleton=singleton)

    def by_trajectory(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        score, task = segments.by_trajectory(rewards, valid, rollouts.extras["traj"])
        if variant == "vanilla":
            return segments.relative(score, task, eps=eps, singleton=singleton)
        agent = segments.same(valid, rollouts.extras["agent"])
        if variant == "agent_mean":
            centre, scale = segments.mean(rewards, agent), segments.std(score, task, ddof=1)
        else:
            centre, scale = segments.mean(score, task), segments.std(rewards, agent, ddof=1)
        return jnp.where(scale > 0, (rewards - centre) / (scale + eps), 0)

    if variant == "agent":
        return stateless(by_agent, needs=("rewards", "agent"))
    return stateless(by_trajectory, needs=("rewards", "traj") if variant == "vanilla" else ("rewards", "traj", "agent"))

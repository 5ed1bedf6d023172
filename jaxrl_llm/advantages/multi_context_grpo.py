"""Multi-context GRPO: all conversations of a trajectory share its advantage (MemSearcher, arXiv 2511.02805)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry


@estimator
def multi_context_grpo(*, eps: float = 1e-6, singleton: str = "zero") -> Estimator:
    """`A = (r - mean) / (sample std + eps)` over the trajectories of the task, for conversations as rows on the G axis.

    Each trajectory counts once, with the mean of its rows, so that trajectories with many conversations do not shift the mean.
    `rewards` [P, G] is the trajectory's reward, repeated on its conversations. A task with one trajectory gets 0, or its raw
    reward with `singleton="raw"`. eps is the published code's, which has `singleton="raw"`. Extras: `traj` i32[P, G].
    """
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def advantages(rollouts):
        score, task = segments.by_trajectory(rollouts.rewards, rollouts.valid, rollouts.extras["traj"])
        return segments.relative(score, task, eps=eps, singleton=singleton)

    return stateless(advantages, needs=("rewards", "traj"))

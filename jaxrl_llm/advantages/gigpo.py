"""GiGPO: trajectories compared per task, and turns compared where they start in the same state (arXiv 2505.10978)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry


@estimator
def gigpo(*, gamma: float = 0.95, step_coef: float = 1.0, mode: str = "mean_norm", cross_steps: bool = False, eps: float = 1e-6,
          singleton: str = "raw") -> Estimator:
    """`A = A_E + step_coef * A_S` for turns as rows on the G axis.

    A_E compares `rewards` (of the episode, repeated on its turns) between the trajectories of the task; with
    `cross_steps` every turn counts, so that long episodes weigh more. A_S compares the returns
    `R_t = step_rewards_t + gamma * R_{t+1}` between all turns of the task with the same `obs`; it is 0 for a single turn.
    `mode` for both: `mean_norm` (x - mean) or `mean_std_norm` ((x - mean) / (sample std + eps)). A task with one
    trajectory keeps its raw reward in A_E, or gets 0 with `singleton="zero"`. The numbers are those of the authors' verl-agent.
    Extras: `step_rewards` f32[P, G]; `traj`, `step`, `obs` i32[P, G] (obs = hash or cluster of the observation; fold
    the agent's number into it to compare agents separately).
    """
    registry.one_of("mode", mode, segments.MODES)
    registry.one_of("singleton", singleton, ("zero", "raw"))

    def advantages(rollouts):
        valid, extras = rollouts.valid, rollouts.extras
        returns = segments.discounted_return(extras["step_rewards"], valid, extras["traj"], extras["step"], gamma=gamma)
        score, task = segments.by_trajectory(rollouts.rewards, valid, extras["traj"])
        if cross_steps:
            task = segments.same(valid)
        episode = segments.relative(score, task, mode=mode, eps=eps, singleton=singleton)
        step = segments.relative(returns, segments.same(valid, extras["obs"]), mode=mode, eps=eps)
        return episode + step_coef * step

    return stateless(advantages, needs=("rewards", "step_rewards", "traj", "step", "obs"))

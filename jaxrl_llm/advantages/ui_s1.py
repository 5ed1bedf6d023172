"""UI-S1: semi-online returns on recorded expert trajectories, compared per step and per task (arXiv 2509.11543)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.control.ui_s1 import semi_online_return
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry


@estimator
def ui_s1(*, gamma: float = 0.5, episode_coef: float = 1.0, step_coef: float = 1.0, episode_source: str = "step_score",
          mode: str = "mean_std_norm", eps: float = 1e-6) -> Estimator:
    """`A = episode_coef * A_E + step_coef * A_S` for steps as rows on the G axis.

    A_S compares `semi_online_return` between the rollouts at the same expert step; it is 0 if there is only one. A_E
    compares, as the published code does, the step's own score with all steps of the task
    (`episode_source="step_score"`), or, as the paper's text says, the sums of the trajectories (`"traj_return"`); a
    single one keeps its raw value. `mode`: `mean_std_norm` (sample std) or `mean_norm`.
    The numbers are the published code's.
    Extras: `step_rewards` f32[P, G] (see `environments.walked.step_score`), `traj`, `step` i32[P, G], `match` bool[P, G].
    """
    registry.one_of("episode_source", episode_source, ("step_score", "traj_return"))
    registry.one_of("mode", mode, segments.MODES)

    def advantages(rollouts):
        valid, extras = rollouts.valid, rollouts.extras
        scores, traj, step = extras["step_rewards"], extras["traj"], extras["step"]
        returns = semi_online_return(scores, extras["match"], valid, traj, step, gamma=gamma)
        task, trajectory = segments.same(valid), segments.same(valid, traj)
        if episode_source == "traj_return":
            scores, task = segments.total(scores, trajectory), segments.once(task, trajectory)
        by_episode = segments.relative(scores, task, mode=mode, eps=eps, singleton="raw")
        by_step = segments.relative(returns, segments.same(valid, step), mode=mode, eps=eps)
        return episode_coef * by_episode + step_coef * by_step

    return stateless(advantages, needs=("step_rewards", "traj", "step", "match"))

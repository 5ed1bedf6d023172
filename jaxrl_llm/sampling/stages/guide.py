"""Marks what an expert wrote in the rollouts of a batch."""
import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, roles_of, with_extras
from jaxrl_llm.topologies.base import GUIDED


def guide() -> Stage:
    """`expert` and `hint_mask` bool[P, G, T], tokens of an expert; `hinted` bool[P, G], rollouts that have some.

    `expert_logprobs` f32[P, G, T] are those of its tokens under their writer; 0 where unknown, as LUFFY has them. The metric
    `guide/unfit` counts whole traces that were too long to begin a trajectory.
    """
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        return batch.measured(guide_metrics(batch.forest) | {"guide/unfit": float(source.stream.unfit())})

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        return marked(rollouts)

    return Stage("guide", end=end, view=view, provides=GUIDED)


def marked(rollouts: Rollouts) -> Rollouts:
    """The rollouts with the extras of `guide`."""
    role = roles_of(rollouts)
    expert = role == Role.EXPERT
    known = np.where(expert, np.nan_to_num(rollouts.behavior_logprobs, nan=0.0), 0).astype(np.float32)
    return with_extras(rollouts.replace(role=role), expert=expert, hint_mask=expert, hinted=expert.any(-1),
                       expert_logprobs=known)


def guide_metrics(forest: Forest) -> dict[str, float]:
    """Metrics of trajectories that an expert began: their share, their mean reward, and an expert's tokens in each."""
    aided, written = forest.aided, forest.role == Role.EXPERT
    metrics = {"guide/share": float(aided.mean())}
    if aided.any():
        metrics |= {"guide/reward": float(forest.rewards[forest.ends][aided].mean()),
                    "guide/tokens": float(forest.length[written].sum() / aided.sum())}
    return metrics

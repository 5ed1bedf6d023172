"""Shapes the rewards of sampled trajectories: a bonus for turns that call tools."""
import numpy as np

from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.control.tool_bonus import tool_reward
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import SAMPLED
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished

READS = (
    Knob("tool_coef", doc="f32[], weight of the reward for turns that call tools, `tool_bonus.tool_reward`, which is added to "
         "the rewards of sampled trajectories; no turn calls tools where the run has none"),
)


def shape() -> Stage:
    """Adds the reward for turns with tool calls to the trajectories that a plan sampled."""
    def grow(batch: Unfinished, source: Origin) -> Unfinished:
        if "tool_coef" not in batch.knobs or "tool_calls" not in source.stream.facts or len(batch.forest.uid) == batch.first:
            return batch
        return batch._replace(forest=with_tool_reward(batch.forest, batch.first, float(batch.knobs["tool_coef"])))

    return Stage("shape", grow=grow, reads=READS)


def with_tool_reward(forest: Forest, first: int, coef: float) -> Forest:
    """The forest with the `tool_reward` added to the rewards of trajectories that end at the node `first` or behind it.

    Turns that call tools are those whose fact `tool_calls` is above 0, in all contexts of a trajectory. Calls that others
    wrote earn nothing.
    """
    assert forest.turn_info is not None
    leaves, (which, last) = forest.leaves, forest.finals
    node, row = forests.chains(forest, leaves)
    calls = np.array([info.get("tool_calls", 0) > 0 for info in forest.turn_info[node]], bool) & np.isin(
        forest.role[node], SAMPLED)
    added = tool_reward(np.bincount(which[row], calls, minlength=len(last)), coef)
    rewards, ends = forest.rewards.copy(), leaves[last]
    rewards[ends] += np.where(ends >= first, added, 0).astype(np.float32)
    return forest.with_columns(rewards=rewards)

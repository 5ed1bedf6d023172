"""The reward for turns that call tools, on trajectories that several wrote."""
import numpy as np
import pytest

from jaxrl_llm.data.forest import grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.sampling.stages.shape import with_tool_reward
from jaxrl_llm.tasks.base import Problem


@pytest.mark.parametrize(("writer", "added"), (
    (Role.POLICY, 0.1), (Role.ELSEWHERE, 0.1), (Role.EXPERT, 0.05), (Role.HINT, 0.05)))
def test_calls_of_others_earn_nothing(writer, added):
    """Two turns that call a tool, then an answer, at half of the reward: 0.5 * 0.1 for each turn with a call of the policy."""
    roles = [writer, Role.ENVIRONMENT, Role.POLICY, Role.ENVIRONMENT, Role.POLICY]
    forest = plant([Problem("?", "", 0)], [[1]], ["success"], answers=False, turns=True)
    forest = grow(forest, [0, 1, 2, 3, 4], [7] * 5, {
        "prompt": [0] * 5, "role": roles, "length": [1] * 5, "stopped": [True] * 5, "rewards": [0, 0, 0, 0, 1.0],
        "components": [[0]] * 4 + [[1.0]], "texts": [""] * 5, "turn_rewards": [0] * 5, "tokens": [2] * 5, "version": [0] * 5,
        "logprobs": [0] * 5, "entropies": [0] * 5,
        "turn_info": [{"tool_calls": 1}, {}, {"tool_calls": 2}, {}, {"tool_calls": 0}]})
    assert with_tool_reward(forest, 1, 0.5).rewards[5] == np.float32(1 + added)
    assert with_tool_reward(forest, 6, 0.5).rewards[5] == 1  # it was sampled by an earlier plan

"""Whether an estimator learns anything from completions that are all alike."""
from typing import Any

import numpy as np

from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.tools.registry import Conflict

_PROBABILITIES = "old_logprobs", "ref_logprobs", "behavior_logprobs", "entropies"


def compares(estimator: Estimator, objective: Objective, group: int) -> bool:
    """Whether nothing is learned from groups of this number of equal completions, whatever their rewards are.

    The estimator is asked, and an objective that reads rewards for its loss without advantages. False if they read more than is
    made up here, or if the objective has signals of its own.
    """
    P, shape = 4, (4, group, 2)
    logprobs: Any = np.full(shape, -1, np.float32)
    rewards = np.repeat(np.linspace(0.1, 1, P, dtype=np.float32)[:, None], group, axis=1)
    fields: dict[str, Any] = {
        **dict(zip(_PROBABILITIES, (logprobs, 1.25 * logprobs, logprobs, -logprobs))), "prompt_ids": np.arange(P),
        "reward_components": rewards[..., None], "rewards": rewards, "tokens": np.ones(shape, np.int32)}
    extras = {"logit_gradients": -logprobs}
    quiet = {*_PROBABILITIES, "rewards", "truncated", "policy_version", "current_version"}
    if not {*estimator.needs} <= {*fields, *extras} or not {*objective.needs} <= quiet:
        return False
    there: Any = np.ones(shape, bool)
    alike = Rollouts(mask=there, valid=there[..., 0], **fields, extras=extras)
    if np.any(estimator.update(alike, estimator.init())[0]):
        return False
    return "rewards" not in objective.needs or not objective.update(logprobs, alike, 0 * logprobs, objective.init())[0]


def _single(group: int, most: int, sizes: list[str]) -> bool:
    """Whether every prompt gets a single completion."""
    return group < 2 and not (sizes and most > 1)


_GROUPS = "config.sampling.group", "config.sampling.max_group", "sizes"
_FEW = "method {method!r} compares the completions of a prompt, but sampling.group is {0}"
CONFLICTS = (
    Conflict((*_GROUPS, "needs.features"), _FEW, "give 2 or more", lambda group, most, sizes, _: _single(group, most, sizes)),
    Conflict((*_GROUPS, "estimator", "objective", "replays"), _FEW, "give 2 or more",
             lambda group, most, sizes, estimator, objective, replays: not replays and _single(group, most, sizes) and compares(
                 estimator, objective, 1)),
    Conflict(("config.sampling.temperature", "knobs", "config.environment", "replays", "estimator", "objective",
              "config.sampling.group"),
             "config.sampling.temperature is 0, at which all completions of a prompt are equal, and method {method!r} compares "
             "them", "give more than 0, usually 1",
             lambda temperature, knobs, environment, replays, estimator, objective, group: not (
                 temperature or "temperature" in knobs or environment or replays) and compares(estimator, objective, group)))

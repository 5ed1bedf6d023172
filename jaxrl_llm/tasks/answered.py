"""Whether texts of others end with the answers that their problems have."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import written


class Verdicts(NamedTuple):
    """Of N texts: `missing` bool[N], those that end without an answer, and `wrong` bool[N], those that end with another one."""

    missing: np.ndarray
    wrong: np.ndarray


def verdicts(reward: rewards.Combined | rewards.ByTask, texts: Sequence[str], problems: Sequence[Problem]) -> Verdicts:
    """What the first reward says of the texts, one for each of the problems.

    A reward that reads no answers (tests of programs) calls every text wrong that does not solve its problem.
    """
    scores = reward(texts, [problem.answer for problem in problems], problems, [len(text) for text in texts])
    above = np.take(reward.solved_above, [problem.task for problem in problems], mode="clip")  # one may be all tasks'
    failed = scores.components[:, 0] <= above
    found = np.array([not reward.extracts or reward.extract(text, problem) is not None
                      for text, problem in zip(texts, problems)], bool)
    return Verdicts(failed & ~found, failed & found)


def reward_of(text: str) -> rewards.Combined:
    """The rewards of a text such as "boxed"; ValueError if it names none."""
    calls = written.calls(text)
    if not calls:
        raise ValueError(f"reward={text!r} names no reward; give {', '.join(rewards.REWARDS)}")
    return rewards.combine([rewards.make(name, **options) for name, options in calls])

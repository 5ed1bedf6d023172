"""Whether texts of others end with the answers that their problems have."""
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.mixture import Mixed
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


@dataclasses.dataclass(frozen=True)
class Graded(Sequence):
    """Problems whose traces are known to be `correct` or not, by problem and number of the trace."""

    problems: Sequence[Problem]
    correct: Mapping[tuple[int, int], bool]

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index):
        problem = self.problems[index]
        place = index % len(self.problems)
        if not any((place, number) in self.correct for number in range(len(problem.extra.get("traces", ())))):
            return problem
        traces = [{**trace, "correct": self.correct.get((place, number), trace.get("correct"))}
                  for number, trace in enumerate(problem.extra["traces"])]
        return dataclasses.replace(problem, extra={**problem.extra, "traces": traces})


def graded(task: Task, reward: rewards.Combined | rewards.ByTask) -> Task:
    """The task, whose training problems say of every trace whether it is correct, as far as the first reward reads answers.

    What the data say themselves stays. Warns of the shares of traces without an answer and with another one.
    """
    unknown = [(place, number, problem, _last_words(trace)) for place, problem in enumerate(task.train[i] for i in range(
        len(task.train))) for number, trace in enumerate(problem.extra.get("traces", ())) if trace.get("correct") is None]
    if not unknown or not reward.extracts:
        return task
    places, numbers, problems, texts = zip(*unknown)
    missing, wrong = verdicts(reward, texts, problems)
    if (missing | wrong).any():
        first = problems[int((missing | wrong).argmax())]
        warnings.warn(f"of {len(texts)} traces, {missing.mean():.1%} end without an answer and {wrong.mean():.1%} with another "
                      f"answer than that of their problem, the first of {first.place or f'problem {first.id}'}; they count as "
                      "wrong", RuntimeWarning, stacklevel=2)
    return dataclasses.replace(task, train=_told(task.train, dict(zip(zip(places, numbers), (~(missing | wrong)).tolist()))))


def _told(problems: Sequence[Problem], correct: Mapping[tuple[int, int], bool]) -> Sequence[Problem]:
    """The problems with what is known of their traces; a mixture stays a mixture."""
    if not isinstance(problems, Mixed):
        return Graded(problems, correct)
    sides = [Graded(side, {(place - start, number): right for (place, number), right in correct.items()
                           if 0 <= place - start < len(side)}) for side, start in zip(problems.sides, problems.starts)]
    return dataclasses.replace(problems, sides=tuple(sides))


def _last_words(trace: Mapping[str, Any]) -> str:
    """What the assistant says last in a trace."""
    if "text" in trace:
        return trace["text"]
    return next((message["content"] for message in reversed(trace["messages"]) if message["role"] == "assistant"), "")

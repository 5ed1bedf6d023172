"""The rewards of several tasks: each completion is scored by the rewards of its problem's task."""
import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrl_llm.rewards.base import Combined, Scores


@dataclasses.dataclass(frozen=True)
class ByTask:
    """As `Combined`, for the tasks with these `labels`: `parts[problem.task]` scores a completion.

    The first component is "score", the first of each task's own. Further ones are named `label/name` and are NaN for
    completions of other tasks. `spent` and the `seconds` of the scores list all rewards of all tasks, one task after another.
    """

    labels: tuple[str, ...]
    parts: tuple[Combined, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return ("score", *(f"{label}/{name}" for label, part in zip(self.labels, self.parts) for name in part.names[1:]))

    @property
    def by_row(self) -> bool:
        return all(part.by_row for part in self.parts)

    @property
    def timed(self) -> bool:
        return any(part.timed for part in self.parts)

    @property
    def extracts(self) -> bool:
        """Whether the first reward of every task extracts the answer's text."""
        return all(part.extracts for part in self.parts)

    @property
    def solved_above(self) -> tuple[float, ...]:
        return tuple(part.rewards[0].solved_above for part in self.parts)

    def extract(self, completion: str, problem) -> Hashable | None:
        return self.parts[problem.task].extract(completion, problem)

    def part(self, share: float) -> "ByTask":
        return dataclasses.replace(self, parts=tuple(part.part(share) for part in self.parts))

    def check(self, problem) -> None:
        self.parts[problem.task].check(problem)

    def prepare(self) -> list[tuple[str, str]]:
        return [(f"{label}/{name}", how) for label, part in zip(self.labels, self.parts) for name, how in part.prepare()]

    def __call__(self, completions: Sequence[str], answers: Sequence[str], problems: Sequence,
                 lengths: Sequence[int] | None = None, spent: np.ndarray | float = 0.0) -> Scores:
        task, names = np.array([problem.task for problem in problems], int), self.names
        total, components = np.zeros(len(task), np.float32), np.full((len(task), len(names)), np.nan, np.float32)
        failures: Counter = Counter()
        ends = np.cumsum([len(part.rewards) for part in self.parts])
        seconds, spent, first = np.zeros(ends[-1]), np.broadcast_to(spent, ends[-1]), 1
        for k, (part, end) in enumerate(zip(self.parts, ends)):
            rows, own = np.flatnonzero(task == k).tolist(), slice(end - len(part.rewards), end)
            columns = [0, *range(first, first + len(part.rewards) - 1)]
            first += len(part.rewards) - 1
            if not rows:
                continue
            scores = part([completions[row] for row in rows], [answers[row] for row in rows], [problems[row] for row in rows],
                          None if lengths is None else [lengths[row] for row in rows], spent[own])
            total[rows], components[np.ix_(rows, columns)], seconds[own] = scores.total, scores.components, scores.seconds
            failures.update(scores.failures)
        return Scores(total, components, names, dict(failures), seconds)

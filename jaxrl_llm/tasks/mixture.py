"""Several tasks as one: each batch has its share of every task, and every problem knows which one it belongs to."""
import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from jaxrl_llm.tasks.base import Part, Problem, Task, fronts_of, question_of, text_of


@dataclasses.dataclass(frozen=True)
class Mixed(Sequence):
    """The problems of one side of several tasks one after another, with ids from `first_id` on.

    `sides`: that side of each task.  `labels`, `weights`: the tasks' labels and weights.
    """

    sides: tuple[Sequence[Problem], ...]
    labels: tuple[str, ...]
    weights: tuple[float, ...]
    first_id: int = 0

    @property
    def starts(self) -> list[int]:
        """Where the problems of each task begin, and where the last ones end."""
        return [0, *itertools.accumulate(map(len, self.sides))]

    def __len__(self) -> int:
        return sum(map(len, self.sides))

    def __getitem__(self, index):
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"problem {index} of a source of {len(self)}")
        task = bisect.bisect_right(self.starts, position) - 1
        problem, label = self.sides[task][position - self.starts[task]], self.labels[task]
        return dataclasses.replace(problem, id=self.first_id + position, task=task,
                                   level=f"{label}/{problem.level}" if problem.level else label)


def mixture(parts: Sequence[Part]) -> Task:
    """One task made of several; levels are prefixed with the label, so that evaluations are by task. It has all their facts.

    Raises ValueError: a task has no training problems, two labels are equal or none, a weight is not above 0, or a prompt that
    one task holds out is one that another trains on, case and white space aside.
    """
    labels, weights = (tuple(values) for values in zip(*((part.label, part.weight) for part in parts)))
    if len(set(labels)) < len(labels) or not all(labels) or any("/" in label for label in labels):
        raise ValueError(f"the tasks of a run need different names without a slash, got {', '.join(labels)}; give each a "
                         "label, for example \"arithmetic(level=add2, label=add2), arithmetic(level=mul2, label=mul2)\"")
    for label, weight in zip(labels, weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"weight of task {label!r} is {weight!r}; give a number above 0")
    for part in parts:
        if not len(part.task.train):
            raise ValueError(f"task {part.label!r} has no problems to train on; name it in config.eval.sets")
    train = Mixed(tuple(part.task.train for part in parts), labels, weights)
    heldout = Mixed(tuple(part.task.heldout for part in parts), labels, weights, len(train))
    fronts = fronts_of(parts)
    kept_out = {question_of(problem, fronts[problem.task]): labels[problem.task] for problem in heldout}
    for problem in train:
        if (owner := kept_out.get(question_of(problem, fronts[problem.task]))) is not None:
            raise ValueError(f"task {owner!r} holds out a prompt that task {labels[problem.task]!r} trains on, "
                             f"{text_of(problem)[:100]!r}; take tasks, seeds or splits that share none")
    facts = tuple(name for name in parts[0].task.facts if all(name in part.task.facts for part in parts))
    return Task(" + ".join(part.task.name for part in parts), train, heldout, reward="", parts=tuple(parts), facts=facts)

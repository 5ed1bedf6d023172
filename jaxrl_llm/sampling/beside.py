"""Given texts beside the prompts of a batch, and how they become rollouts of it."""
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data import text_forest
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import APART, GIVEN, Rollouts
from jaxrl_llm.data.text_forest import TEXTS
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.loader import Batches


@dataclasses.dataclass(frozen=True, eq=False)
class Beside:
    """Texts of a run whose method samples.

    Attributes:
      data: problems with one text each, in an endless order; None: no texts.
      count: texts of a batch.  longest: (S, T), the most tokens of a prompt and behind it.
      held_out: problems with the texts whose loss evaluations measure, at most `count` in each part.
      left_out: number of texts that are not learned from, by reason.
    """

    data: Batches | None = None
    count: int = 0
    longest: tuple[int, int] = (0, 0)
    held_out: Sequence[Sequence[Problem]] = ()
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def told(self) -> list[tuple[str, str]]:
        """Rows for the head of a run."""
        if self.data is None:
            return []
        without = "".join(f"; {count} left out: {reason}" for reason, count in sorted(self.left_out.items()))
        texts, held = self.data.get_state()["problems"], sum(map(len, self.held_out))
        return [("texts beside prompts", f"{self.count} of {texts:,} in each batch, {held} held out{without}")]


NONE = Beside()


def planted(problems: Sequence[Problem], source: Any, first_uid: int, version: int, draw: int = 0) -> Forest:
    """The forest of these texts, with the columns of the source's own forests; rewards are 0.

    Its problems are numbers and words alone, which a checkpoint stores while the batch waits.
    """
    groups = [problem.extra[TEXTS] for problem in problems]
    bare = [dataclasses.replace(problem, extra={k: x for k, x in problem.extra.items() if k != TEXTS}) for problem in problems]
    rows = list(zip(bare, text_forest.prompts_of(groups), strict=True))
    spell = functools.partial(source.stream.tokenizer.decode_batch, skip_special=False)
    return text_forest.grown(source.planted(rows, draw=draw), groups, spell, first_uid=first_uid, apart=source.stream.group,
                             version=version)


def rollouts(problems: Sequence[Problem], source: Any, version: int) -> Rollouts:
    """A batch of these texts alone, as learners and objectives of texts read it."""
    return marked(source.view(planted(problems, source, 0, version), version), problems, first=0)


def marked(rollouts: Rollouts, problems: Sequence[Problem], first: int) -> Rollouts:
    """The batch whose prompts from number `first` on are those of texts, which are learned from `apart`.

    `given` bool[P, G] names the texts, which `valid` leaves out; `weight` f32[P, G] is 1 for rollouts.
    """
    place = np.arange(len(rollouts.valid))[:, None]
    here = (first <= place) & (place < first + len(problems))
    given = np.asarray(rollouts.valid) & here
    weight = np.ones(given.shape, np.float32)
    weight[first:first + len(problems)] = [[problem.extra[TEXTS][0].weight] for problem in problems]
    apart = rollouts.extras.get(APART, np.zeros(rollouts.mask.shape, bool))
    apart = np.where(here[..., None], rollouts.mask & given[..., None], apart)
    return rollouts.replace(valid=rollouts.valid & ~given, mask=rollouts.mask & ~here[..., None],
                            extras={**rollouts.extras, GIVEN: given, "weight": weight, APART: apart})

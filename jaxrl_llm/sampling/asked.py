"""The policy's answers to training problems that are counted and not learned from: a measure before a step.

A controller asks for it by the knob `measured_times`, for instance of all problems before the first step, and observes the
counts. The answers do not depend on how far an interrupted measure had come.
"""
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.control import Fact
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.fitting import fitting_problems
from jaxrl_llm.sampling.heldout import measuring
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies.acts import Begin, groups

TIMES = Knob("measured_times", ("N",), 0, doc="i32[N], how often each training problem is asked before the next step, without "
             "learning from the answers; 0: not. Controllers then observe `measured_tried` and `measured_right`")
READS = (TIMES,)
FACTS = (
    Fact("measured_tried", "i32[N], answers to each training problem that `measured_times` asked for, before a step",
         ("knobs.measured_times",)),
    Fact("measured_right", "i32[N], those of them that solve their problem", ("knobs.measured_times",)),
)


class Asked(NamedTuple):
    """A measure, complete or in progress: `tried`, `right` i32[N] of the first `done` of the problems that are asked."""

    tried: np.ndarray
    right: np.ndarray
    done: int = 0

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """The facts that controllers observe."""
        return {"measured_tried": self.tried, "measured_right": self.right}

    @property
    def summary(self) -> str:
        """Who was asked and what came of it, for a log."""
        seen = self.tried > 0
        rates = self.right[seen] / self.tried[seen]
        return (f"asked {seen.sum()} training problems {int(self.tried.max(initial=0))} times: {rates.mean():.1%} right, "
                f"{(rates == 0).sum()} never, {(rates == 1).sum()} always") if seen.any() else "asked no training problem"


def none(problems: int) -> Asked:
    """The beginning of a measure of a task with this number of training problems."""
    return Asked(np.zeros(problems, np.int32), np.zeros(problems, np.int32))


def ask(source: Source, params: Any, lora: Any, times: np.ndarray, key: jax.Array, begun: Asked, timer: PhaseTimer | None = None
        ) -> Iterator[Asked]:
    """The measure after each further batch of problems, those with `times` i32[N] above 0 in their order.

    A prompt that does not fit is not tried.
    """
    timer, stream, wanted = timer or PhaseTimer(), source.held_out, np.flatnonzero(times > 0)
    apart = -(-int(times.max(initial=0)) // stream.group) * stream.group  # uids of a problem, whole blocks of them
    for start in range(begun.done, len(wanted), source.prompts):
        ids = wanted[start:start + source.prompts]
        stream.forget()
        stream.publish(Snapshot(-1, params, lora, key, measuring()))
        forest = _sampled(source, ids, times, start * apart, timer)
        number = np.array([problem.id for problem in forest.problems], np.int64)[forest.prompt[forest.ends]]
        tried, right = (np.bincount(some, minlength=len(times)).astype(np.int32)
                        for some in (number, number[forest.solved[forest.ends]]))
        begun = Asked(begun.tried + tried, begun.right + right, start + len(ids))
        yield begun
    stream.rest()


def _sampled(source: Source, ids: np.ndarray, times: np.ndarray, first_uid: int, timer: PhaseTimer) -> Forest:
    """The answers to those of the training problems `ids` whose prompts fit."""
    stream, mine = source.held_out, ids[jax.process_index()::jax.process_count()]
    rows = fitting_problems([source.task.train[int(number)] for number in mine], stream.tokenizer, stream.prompt_tokens,
                            source.overlong, jax.process_count(), functools.partial(stream.partner.encode, timer=timer))
    forest = stream.partner.plant([problem for problem, _ in rows], [tokens for _, tokens in rows], draw=0)
    left, acts = times[[problem.id for problem in forest.problems]], list[Begin]()
    while left.any():  # a group of each problem at a time
        acts += groups(np.arange(len(left)), np.minimum(left, stream.group))
        left = np.maximum(left - stream.group, 0)
    return stream.run(forest, acts, first_uid, timer) if acts else forest

"""A schedule from outside the package: `pipelined`, whose process ends once at a named place, without cleaning up."""
import os
from pathlib import Path

from jaxrl_llm.learning.schedules import Schedule, make


class Dying:
    """As `inner`, whose call number `count` of `method` ends the process."""

    def __init__(self, inner, method, count, mark):
        self._inner, self._method, self._count, self._mark = inner, method, count, mark

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        return found if name != self._method else self._call

    def _call(self, *arguments, **named):
        self._count -= 1
        if not self._count:
            end(self._mark)
        return getattr(self._inner, self._method)(*arguments, **named)


def end(mark):
    Path(mark).write_text("ended")
    os._exit(9)


def dying(*, mark: str, place: str, lag: int = 1, count: int = 4) -> Schedule:
    """At the `count`-th time that `place` ("next", "learn", "step") is reached, unless the file `mark` exists."""
    inner = make("pipelined", lag=lag)

    def steps(source, learner, state, *others, **named):
        if not Path(mark).exists():
            source = Dying(source, "next", count, mark) if place == "next" else source
            learner = Dying(learner, "learn", count, mark) if place == "learn" else learner
        running, sent = inner.steps(source, learner, state, *others, **named), None
        for number in range(1, 1000):
            sent = yield running.send(sent)
            if place == "step" and number == count and not Path(mark).exists():
                end(mark)

    return Schedule(steps, lag)

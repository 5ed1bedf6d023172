"""Texts that others wrote for a problem: solutions of experts, in `Problem.extra["traces"]`, as plain data.

    extra={"traces": [{"text": "3+4 is 7.", "writer": "a teacher", "correct": True, "logprobs": [-0.1, -2.0, ...]}, ...]}
"""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tasks.base import Messages, Problem

KEYS = ("text", "messages", "writer", "correct", "logprobs")


class Trace(NamedTuple):
    """A text behind the prompt of a problem.

    words: the text; or messages of the assistant, and of tools between them.  writer: its name; "": unknown.
    correct: whether it solves the problem; None: unknown.  logprobs: those of its tokens (nats), with its end token, under its
    writer as it wrote them, NaN where unknown; None: all unknown.
    """

    words: str | Messages
    writer: str = ""
    correct: bool | None = None
    logprobs: Sequence[float] | None = None


def traces_of(problem: Problem) -> tuple[Trace, ...]:
    """All traces of a problem; without `extra["traces"]` its `extra["solution"]`, or else its answer.

    Raises ValueError with the place for a trace without words, or with an unknown key.
    """
    if "traces" not in problem.extra:
        return (Trace(problem.extra.get("solution", problem.answer), correct=True),)
    return tuple(_read(one, f"{problem.place or f'problem {problem.id}'}: traces[{number}]")
                 for number, one in enumerate(problem.extra["traces"]))


def trace_of(problem: Problem, number: int) -> Trace:
    """One of the traces of a problem; ValueError for a number that it lacks."""
    traces = traces_of(problem)
    if not 0 <= number < len(traces):
        raise ValueError(f"{problem.place or f'problem {problem.id}'} has {len(traces)} traces, and no trace {number}; numbers "
                         "count from 0")
    return traces[number]


def _read(given: Mapping[str, Any], where: str) -> Trace:
    """A trace from its keys."""
    if strange := sorted({*given} - {*KEYS}):
        raise ValueError(f"{where} has the key {strange[0]!r}; give {', '.join(KEYS)}")
    words = given.get("text", given.get("messages"))
    if not words:
        raise ValueError(f"{where} has no words; give it a 'text', or 'messages' of the assistant and of tools")
    return Trace(words if isinstance(words, str) else tuple(words), given.get("writer", ""), given.get("correct"),
                 given.get("logprobs"))


def useful(problem: Problem, wrong: bool = False) -> list[int]:
    """The numbers of the traces to learn from: those that are not known to be wrong, or all of them if `wrong` ones count."""
    return [number for number, one in enumerate(traces_of(problem)) if wrong or one.correct is not False]

"""Trajectories without failed calls: a correction replaces the call that it corrects (CLEANER, arXiv 2601.15141)."""
import copy
import dataclasses
import difflib
import os
import random
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import environments
from jaxrl_llm.environments.base import Environment, Message, Turn, environment, of_inner
from jaxrl_llm.tasks.base import Problem

COMPARED = 1000  # characters: the time of a comparison grows with more than their square
Parts = list[tuple[int, int, int]]  # see `Turn.rewritten`


@dataclasses.dataclass
class Rewinding:
    """The state of the environment, whether failed calls are still rewritten, and the messages so far.

    `before`, `failed`: the state before a call that failed, and that message; None if there is nothing to correct.
    `retries`: corrections of the current turn.
    """

    inner: Any
    active: bool
    messages: int = 0
    before: Any = None
    failed: str | None = None
    retries: int = 0


@environment
def purified(*, environment: str = "tool_use", options: Mapping[str, Any] | None = None, mark: str = "<tool_call>",
             threshold: float = 0.5, retries: int = 3, messages: int = 30, share: float = 1.0) -> Environment:
    """An environment by name in which the policy reads why a call failed, and is trained on its correction instead.

    The correction replaces the failed turn, as if it had come first: only its call if that is similar to the failed one, else
    the whole message, see `merged`; the call begins with `mark`. A correction without a call leaves the turn unchanged. After
    `retries` corrections of a turn the last one is kept, and the rest of the trajectory is not rewritten; nor is anything after
    the first `messages` messages. A `share` of the training trajectories is rewritten, and no trajectory of held-out problems.
    The fact `rewritten` counts the turns of a trajectory that are corrections. The numbers are those of the published code.
    Raises ValueError for an environment without the fact `tool_errors`, or one that begins contexts.
    """
    inner = environments.make(environment, **(options or {}))
    if "tool_errors" not in inner.facts or inner.contexts > 1:
        raise ValueError(f"environment {inner.name!r} does not say the fact 'tool_errors', or begins new contexts; take one "
                         "with tools, such as tool_use")
    trained = len(inner.task.train)

    def reset(problem: Problem, key: int) -> tuple[Rewinding, list[Message]]:
        state, opening = inner.reset(problem, key)
        return Rewinding(state, problem.id < trained and random.Random(f"{key} rewind").random() < share), list(opening)

    def step(state: Rewinding, message: Message) -> Turn:
        text, parts, state.messages = message["content"], Parts(), state.messages + 1
        if state.failed is not None and mark in text:
            text, parts = merged(state.failed, text, mark, threshold)
            state.inner, state.retries = state.before, state.retries + 1
        else:
            state.retries = 0
        before = copy.deepcopy(state.inner) if state.active else None
        turn = inner.step(state.inner, {**message, "content": text})
        state.before = state.failed = None
        if state.active and turn.info["tool_errors"] and not turn.done:
            state.active = state.retries < retries and state.messages < messages
            state.before, state.failed = (before, text) if state.active else (None, None)
        return turn._replace(rewritten=parts, info={**turn.info, "rewritten": int(bool(parts))})

    return dataclasses.replace(
        inner, name=f"{inner.name}+purified", reset=reset, step=step, facts={**inner.facts, "rewritten": "count"},
        **of_inner(inner))


def merged(failed: str, correction: str, mark: str, threshold: float) -> tuple[str, Parts]:
    """A message made of a failed one and its correction, and its parts, as in `Turn.rewritten`.

    Calls begin with the first `mark`. If the `similarity` of the texts after it is at least the threshold, the message is the
    failed one's reasoning and the correction's call; else it is the whole correction.
    """
    old, new, end = failed.find(mark), correction.find(mark), len(correction) + 1
    if old < 0 or similarity(failed[old + len(mark):], correction[new + len(mark):]) < threshold:
        return correction, [(0, 0, end)]
    return failed[:old] + correction[new:], [(1, 0, old), (0, new, end)]


def similarity(one: str, other: str) -> float:
    """`2 M / (characters of both)`, M the matching characters (Ratcliff-Obershelp), in time linear in the texts.

    Of a text longer than `COMPARED` the common beginning and end match, and what is between them as its first characters do.
    """
    if max(len(one), len(other)) <= COMPARED:
        return difflib.SequenceMatcher(None, one, other).ratio()
    begin = len(os.path.commonprefix([one, other]))
    one, other = one[begin:], other[begin:]
    end = len(os.path.commonprefix([one[::-1], other[::-1]]))
    left = (len(one) + len(other)) / 2 - end
    between = difflib.SequenceMatcher(None, one[:len(one) - end][:COMPARED], other[:len(other) - end][:COMPARED]).ratio()
    return (begin + end + between * left) / (begin + end + left)

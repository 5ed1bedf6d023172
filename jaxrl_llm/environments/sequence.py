"""Several problems of a task in one conversation: each is answered, scored and commented on before the next."""
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.single import ideal, opening, scorer
from jaxrl_llm.tasks.base import Problem, disjoint_task


@dataclasses.dataclass
class SequenceState:
    """The problems of a trajectory, and the number of answered ones."""

    problems: Sequence[Problem]
    answered: int = 0


@environment
def sequence(*, task: str = "arithmetic", options: Mapping[str, Any] | None = None, reward: str | None = None,
             length: int = 3, answers: bool = True) -> Environment:
    """`length` consecutive problems of a task of `jaxrl_llm.tasks`, such as `reasoning_gym`, one per turn.

    After each answer the policy reads whether it was right, with `answers` also the right answer, and the next problem; the
    system message is given only before the first problem. The reward of a turn is the verifier's score divided by `length`.
    Raises ValueError for unknown names, a length below 1, and a task with fewer problems.
    """
    if length < 1:
        raise ValueError(f"length={length}; give at least 1")
    inner = tasks.make_chat(task, options)
    name = reward or inner.reward
    score = scorer(name, inner.train, inner.heldout)

    def build(items: Sequence[Problem], number: int) -> Problem:
        return Problem(tuple(dict(message) for message in opening(items[0])), "", number, items[0].level,
                       {"problems": tuple(items)})

    def reset(problem: Problem, key: int) -> tuple[SequenceState, list[Message]]:
        return SequenceState(problem.extra["problems"]), list(opening(problem))

    def step(state: SequenceState, message: Message) -> Turn:
        problem = state.problems[state.answered]
        state.answered += 1
        earned = score(message["content"], problem)
        if state.answered == length:
            return Turn(reward=earned / length, done=True, info={"score": earned})
        verdict = "Right." if earned >= 1 else f"Wrong: {problem.answer}." if answers else "Wrong."
        said = [dict(one) for one in opening(state.problems[state.answered]) if one["role"] != "system"]
        said[0]["content"] = f"{verdict}\n\n{said[0]['content']}"
        return Turn(said, earned / length, info={"score": earned})

    train, heldout = (_runs(source, length) for source in (inner.train, inner.heldout))
    return Environment(
        name=f"{inner.name} x {length}", task=disjoint_task(f"{inner.name} x {length}", train, heldout, build, name),
        reset=reset, step=step, oracle=lambda state: ideal(name, state.problems[state.answered]))


def _runs(source: Sequence[Problem], length: int) -> list[list[Problem]]:
    """The problems in runs of `length`; a remainder at the end is dropped."""
    return [[source[start + i] for i in range(length)] for start in range(0, len(source) - length + 1, length)]

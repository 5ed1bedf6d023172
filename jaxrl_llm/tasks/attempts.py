"""Sums demonstrated with several attempts: completions of very unequal lengths, of which the last number counts."""
import dataclasses

import numpy as np

from jaxrl_llm.tasks.arithmetic import arithmetic
from jaxrl_llm.tasks.base import Problem, Task, split_position, task


@task
def attempts(*, level: str = "nocarry3", most: int = 12, tail: float = 1.5) -> Task:
    """The problems of `arithmetic(level)`, demonstrated by wrong numbers and then the right one: `"123+231="`, `"356 354"`.

    The number n of numbers is heavy-tailed, P(n) proportional to n^-tail for n = 1 .. `most`; a wrong one has one digit
    changed. A policy that imitates them makes needless attempts. The reward reads the last number; a cost of length, such as
    `soft_overlong(max_length=48, cache=48, weight=0.3)`, rewards getting the first attempt right. Raises ValueError: an unknown
    level, `most` below 1.
    """
    if most < 1:
        raise ValueError(f"attempts(most={most}): give at least 1 number for a demonstration")
    task = arithmetic(level=level)
    chances = np.arange(1, most + 1.0) ** -tail
    cumulative = np.cumsum(chances / chances.sum())

    def shown(problem: Problem) -> Problem:
        random = np.random.default_rng(int(split_position(f"attempts {problem.prompt}") * 2**63))
        wrong = [_changed(problem.answer, random) for _ in range(int(np.searchsorted(cumulative, random.random())))]
        return dataclasses.replace(problem, extra={**problem.extra, "solution": " ".join([*wrong, problem.answer])})

    def side(problems) -> list[Problem]:
        return [shown(problem) for problem in problems]

    return dataclasses.replace(task, name=f"attempts/{level}", train=side(task.train), heldout=side(task.heldout),
                               reward="last_number")


def _changed(answer: str, random: np.random.Generator) -> str:
    """A number that differs in one digit."""
    place = int(random.integers(len(answer)))
    digit = (int(answer[place]) + int(random.integers(1, 10))) % 10
    return answer[:place] + str(digit) + answer[place + 1:]

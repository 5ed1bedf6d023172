"""Sums demonstrated in two styles of known shares, to observe which of them survives training."""
import dataclasses

from jaxrl_llm.tasks.arithmetic import arithmetic
from jaxrl_llm.tasks.base import Problem, Task, split_position, task


@task
def styles(*, level: str = "nocarry3", worked: float = 0.5) -> Task:
    """The problems of `arithmetic(level)`, demonstrated as `"465"` or, a share `worked` of them, as `"4 6 5 465"`.

    A problem's words determine its style. The reward reads the last number and ignores the style: any preference that training
    shows comes from the policy. A completion that fits `worked=\\d( \\d)* \\d+` has the longer one. Raises ValueError: an
    unknown level, or a share outside [0, 1].
    """
    if not 0 <= worked <= 1:
        raise ValueError(f"styles(worked={worked}): give the share of worked demonstrations, 0 to 1")
    task = arithmetic(level=level)

    def shown(problem: Problem) -> Problem:
        if split_position(f"styles {problem.prompt}") >= worked:
            return problem
        return dataclasses.replace(problem, extra={**problem.extra, "solution": " ".join([*problem.answer, problem.answer])})

    def side(problems) -> list[Problem]:
        return [shown(problem) for problem in problems]

    return dataclasses.replace(task, name=f"styles/{level}", train=side(task.train), heldout=side(task.heldout),
                               reward="last_number")

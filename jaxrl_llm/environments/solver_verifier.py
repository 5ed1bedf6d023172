"""Two agents on a task with one answer: a solver answers, a verifier accepts or asks for another answer (arXiv 2602.08847)."""
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.single import ideal, opening, scorer
from jaxrl_llm.tasks.base import Problem

SOLVER, VERIFIER = 0, 1
ASKED = "Is this answer right? Say yes or no."
AGAIN = "The answer was rejected. Give another one."
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@dataclasses.dataclass
class SolverDialogue:
    """A problem, the score of the last answer, answers so far, and the next speaker."""

    problem: Problem
    score: float = 0.0
    answers: int = 0
    agent: int = SOLVER


@environment
def solver_verifier(*, task: str = "arithmetic", options: Mapping[str, Any] | None = None, reward: str | None = None,
                    loops: int = 2) -> Environment:
    """A task of `jaxrl_llm.tasks`; the policy speaks for both agents, in one conversation.

    The solver (agent 0) answers, the verifier (agent 1) says yes or no; after a no the solver answers again, `loops` times in
    total, and the last answer is not verified. Both get the score of the last answer. An unreadable verdict counts as yes.
    Raises ValueError for unknown names, and for `loops` below 1.
    """
    if loops < 1:
        raise ValueError(f"loops={loops}; give at least 1")
    problems = tasks.make_chat(task, options)
    name = reward or problems.reward
    score = scorer(name, problems.train, problems.heldout)
    return Environment(
        name=f"{problems.name}+verifier", task=problems,
        reset=lambda problem, key: (SolverDialogue(problem), list(opening(problem))),
        step=functools.partial(_step, score=score, loops=loops), facts={"agent": "turn", "functional_group": "turn"},
        oracle=lambda state: ideal(name, state.problem) if state.agent == SOLVER else "yes" if state.score > 0 else "no",
        choices=lambda state: ["yes", "no"] if state.agent == VERIFIER else ["0", "1"])


def _step(state: SolverDialogue, message: Message, *, score: Callable[[str, Problem], float], loops: int) -> Turn:
    info = {"agent": state.agent, "functional_group": state.agent}
    if state.agent == SOLVER:
        state.score, state.answers = score(message["content"], state.problem), state.answers + 1
        if state.answers == loops:
            return Turn(reward=state.score, done=True, info=info)
        state.agent = VERIFIER
        return Turn([{"role": "user", "content": ASKED}], info=info)
    verdicts = _VERDICT.findall(message["content"])
    if not verdicts or verdicts[-1].lower() == "yes":
        return Turn(reward=state.score, done=True, info=info)
    state.agent = SOLVER
    return Turn([{"role": "user", "content": AGAIN}], info=info)

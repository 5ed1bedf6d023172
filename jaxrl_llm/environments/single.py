"""Tasks with one answer as environments: one message of the policy, which the task's verifier scores."""
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm import rewards, tasks
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.rewards.math import last_boxed
from jaxrl_llm.tasks.base import Problem, check_each

# The form in which each verifier expects the answer:
_FORMS = {"boxed": r"\boxed{%s}", "token_f1": r"\boxed{%s}", "reasoning_gym": "<answer>%s</answer>"}


@environment
def single(*, task: str = "arithmetic", options: Mapping[str, Any] | None = None, reward: str | None = None) -> Environment:
    """The problems of a task of `jaxrl_llm.tasks`; the reward is the task's, or the named one.

    Raises ValueError for an unknown task, option or reward.
    """
    problems = tasks.make(task, **(options or {}))
    name = reward or problems.reward
    score = scorer(name, problems.train, problems.heldout)
    return Environment(
        name=problems.name, task=problems, reset=lambda problem, key: (problem, opening(problem)),
        step=lambda problem, message: Turn(reward=score(message["content"], problem), done=True),
        oracle=lambda problem: ideal(name, problem))


def opening(problem: Problem) -> Sequence[Message]:
    """The prompt of a problem as messages; plain text becomes a user message."""
    return [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else list(problem.prompt)


def scorer(name: str, *sides: Iterable[Problem]) -> Callable[[str, Problem], float]:
    """`score(text, problem)` by a reward of that name; rewards with processes use one, since there are many environments.

    Raises ValueError for a problem of the `sides` of its task that lacks what the reward reads.
    """
    combined = rewards.combine([_alone(name)])
    check_each(itertools.chain(*sides), combined.check)
    return lambda text, problem: float(combined([text], [problem.answer], [problem]).total[0])


def reader(name: str) -> Callable[[str], Hashable | None]:
    r"""The answer that a reward of that name reads in a text, or None; rewards without an extractor look for `\boxed{}`."""
    return _alone(name).extract or last_boxed


def _alone(name: str) -> rewards.Reward:
    """The reward, with one process if it uses processes."""
    return rewards.make(name, **({"workers": 1} if "workers" in rewards.REWARDS.parameters(name) else {}))


def ideal(name: str, problem: Problem) -> str:
    """The answer in the form that a reward expects."""
    return _FORMS.get(name, "%s") % problem.answer

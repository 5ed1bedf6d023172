"""Environments in which every turn is a separate context with the last turns as text (verl-agent, arXiv 2505.10978)."""
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import environments
from jaxrl_llm.environments.base import Environment, Message, Turn, environment, of_inner
from jaxrl_llm.environments.parsers import without_thoughts
from jaxrl_llm.tasks.base import Problem


@dataclasses.dataclass
class Window:
    """The state of the environment, and all messages so far."""

    inner: Any
    turns: list[tuple[str, str]] = dataclasses.field(default_factory=list)


@environment
def recent(*, environment: str = "treasure", options: Mapping[str, Any] | None = None, turns: int = 2,
           contexts: int = 8, thoughts: bool = True) -> Environment:
    """An environment by name in which every turn begins a new context: the opening, and the last `turns` turns as text.

    Before each answer is a line with the policy's message, "> message". The length of a context does not depend on the number
    of turns. A trajectory ends with the last of its `contexts`, with the reward of `Environment.cut` if it goes on. Without
    `thoughts` messages begin after their last `</think>`, as chat templates such as Qwen3's write earlier turns; the policy is
    trained on what it thought. Raises ValueError for an environment that begins contexts itself, for `turns` below 1 and
    `contexts` below 2.
    """
    inner = environments.make(environment, **(options or {}))
    if inner.contexts > 1:
        raise ValueError(f"environment {inner.name!r} begins new contexts itself; take one that keeps the conversation")
    if turns < 1 or contexts < 2:
        raise ValueError(f"turns={turns}, contexts={contexts}; allowed are at least 1 and at least 2")

    def reset(problem: Problem, key: int) -> tuple[Window, list[Message]]:
        state, messages = inner.reset(problem, key)
        return Window(state), list(messages)

    def step(state: Window, message: Message) -> Turn:
        turn, said = inner.step(state.inner, message), message["content"]
        said = said if thoughts else without_thoughts(said).lstrip("\n")
        state.turns.append((said, "\n".join(one["content"] for one in turn.messages)))
        if turn.done:
            return turn._replace(messages=())
        if len(state.turns) == contexts:
            last = 0.0 if inner.cut is None else inner.cut(state.inner)
            return turn._replace(messages=(), reward=turn.reward + last, done=True)
        text = "\n".join(f"> {said}\n{read}" for said, read in state.turns[-turns:])
        return turn._replace(messages=[{"role": "user", "content": text}], fresh=True)

    return dataclasses.replace(inner, name=f"{inner.name}+recent", reset=reset, step=step, contexts=contexts, **of_inner(inner))

"""Classes whose methods are tools, as environments: the shape that TRL's `environment_factory` takes.

A class has `reset(**row)`, which returns a text for the end of the prompt or None, public methods with types and a docstring,
which become tools, and optionally `get_reward()`. There is one object for each trajectory. The policy reads the exception of a
method, as in TRL; exceptions of `reset` and `get_reward` make the trajectory invalid.
"""
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.environments import tools
from jaxrl_llm.environments.base import Environment, Message, Turn
from jaxrl_llm.environments.parsers import PARSERS
from jaxrl_llm.environments.single import opening
from jaxrl_llm.registry import one_of
from jaxrl_llm.tasks.base import Problem, Task


@dataclasses.dataclass
class Played:
    """An object of the class, its methods as tools, and how many messages the policy has sent."""

    instance: Any
    tools: list[tools.Tool]
    turns: int = 0


def of_methods(factory: Callable[[], Any], task: Task, *, reward: Callable[[Any], float] | None = None, parser: str = "hermes",
               turns: int = 16, returns: tuple[float, float] = (0.0, 1.0), replayable: bool = True) -> Environment:
    """The environment of a class (or of a function that makes objects) and the problems of a task.

    `reset` gets those of `prompt`, `answer` and the entries of `problem.extra` that it accepts. The trajectory ends with a
    message that calls nothing, or at the last of `turns`; its return is `get_reward()`, or `reward(object)` if that is given.
    Objects whose answers depend on more than their calls, such as on a server, are not `replayable`.
    Raises ValueError for a class without `reset`, without a reward, or with a method that cannot be a tool.
    """
    one_of("parser of calls", parser, PARSERS)
    probe = factory()
    name = type(probe).__name__
    if not callable(getattr(probe, "reset", None)):
        raise ValueError(f"class {name} has no method reset(**row)")
    if reward is None and not callable(getattr(probe, "get_reward", None)):
        raise ValueError(f"class {name} has no method get_reward(); write one, or give reward=function of an object")

    def reset(problem: Problem, key: int) -> tuple[Played, list[Message]]:
        instance = factory()
        said = instance.reset(**_row(instance.reset, problem))
        return Played(instance, _tools(instance)), _with_text(opening(problem), said, name)

    def step(state: Played, message: Message) -> Turn:
        state.turns += 1
        calls = PARSERS[parser](message["content"])
        said = tools.answers(state.tools, calls)
        info = {"tool_calls": len(calls), "tool_errors": sum("error" in one["content"].lower() for one in said),
                "malformed": any(call.error for call in calls), "action": tools.identity(calls) if calls else None}
        if calls and state.turns < turns:
            return Turn(said, info=info)
        value = state.instance.get_reward() if reward is None else reward(state.instance)
        return Turn(said, value, True, info)

    return Environment(name=name, task=task, reset=reset, step=step, tools=tuple(tool.schema for tool in _tools(probe)),
                       returns=returns, replayable=replayable,
                       facts={"tool_calls": "count", "tool_errors": "count", "malformed": "any"})


def _tools(instance: Any) -> list[tools.Tool]:
    """A tool for each public method of the class except `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)
             if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [_forgiving(tools.of_function(getattr(instance, name))) for name in names]


def _forgiving(tool: tools.Tool) -> tools.Tool:
    """The tool with its exceptions turned into errors that the policy reads."""
    if inspect.iscoroutinefunction(tool.call):
        raise ValueError(f"method {tool.name!r} is asynchronous; steps run in threads or processes, so a plain method may wait")

    def call(**arguments):
        try:
            return tool.call(**arguments)
        except Exception as error:
            raise tools.ToolError(str(error)) from error

    return dataclasses.replace(tool, call=call)


def _row(reset: Callable, problem: Problem) -> dict[str, Any]:
    row = {"prompt": problem.prompt, "answer": problem.answer, **problem.extra}
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def _with_text(messages: Sequence[Mapping[str, Any]], said: Any, name: str) -> list[Message]:
    """The prompt, with the text of `reset` appended to its last message."""
    if said is None:
        return list(messages)
    if not isinstance(said, str):
        raise TypeError(f"{name}.reset returned {said!r:.100}; allowed are a text and None")
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + said}]

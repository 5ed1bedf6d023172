"""Classes whose methods are tools, as environments: the shape that TRL's `environment_factory` takes.

A class has `reset(**row)`, which returns a text for the end of the prompt or None, public methods with types and a docstring,
which become tools, and optionally `get_reward()`. There is one object for each trajectory. All of these may be asynchronous;
they are then run on one event loop for all trajectories. The policy reads the exception of a method, as in TRL; exceptions of
`reset` and `get_reward` make the trajectory invalid.
"""
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.environments import tools
from jaxrl_llm.environments.background import wait
from jaxrl_llm.environments.base import Environment, Late, Message, Turn, environment
from jaxrl_llm.environments.described import described
from jaxrl_llm.environments.parsers import named_parser
from jaxrl_llm.environments.single import opening
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools import registry


@dataclasses.dataclass
class ObjectEpisode:
    """An object of the class, and how many messages the policy has sent."""

    instance: Any
    turns: int = 0


@environment
def methods_of(*, target: str, task: str, options: Mapping[str, Any] | None = None, reward: str | None = None,
               parser: str = "hermes", turns: int = 16, returns: tuple[float, float] = (0.0, 1.0), replayable: bool = True,
               deadline: float = 20.0) -> Environment:
    """Your class "module:Class" and the problems of a task of `jaxrl_llm.tasks`, as in `of_methods`.

    `reward` is your "module:function" of an object, for a class without `get_reward()`. Raises ValueError as `of_methods` does
    and for names that are not there.
    """
    return of_methods(registry.function_of("class", target), tasks.make(task, **(options or {})),
                      reward=None if reward is None else registry.function_of("reward", reward), parser=parser, turns=turns,
                      returns=returns, replayable=replayable, deadline=deadline)


def of_methods(factory: Callable[[], Any], task: Task, *, reward: Callable[[Any], float] | None = None, parser: str = "hermes",
               turns: int = 16, returns: tuple[float, float] = (0.0, 1.0), replayable: bool = True,
               deadline: float = 20.0) -> Environment:
    """The environment of a class (or of a function that makes objects) and the problems of a task.

    `reset` gets those of `prompt`, `answer` and the entries of `problem.extra` that it accepts. The trajectory ends with a
    message that calls nothing, at the last of `turns`, or where a limit of the run cuts it; its return is `get_reward()`, or
    `reward(object)` if that is given.
    Objects whose answers depend on more than their calls, such as on a server, are not `replayable`. An asynchronous method
    that takes more than `deadline` seconds loses the trajectory as a timeout; steps of a class that has one run concurrently.
    Raises ValueError for a class without `reset`, without a reward, or with a method that cannot be a tool.
    """
    parse = named_parser(parser)
    probe = factory()
    name = type(probe).__name__
    if not callable(getattr(probe, "reset", None)):
        raise ValueError(f"class {name} has no method reset(**row)")
    if reward is None and not callable(getattr(probe, "get_reward", None)):
        raise ValueError(f"class {name} has no method get_reward(); write one, or give reward=function of an object")
    listed = _tools(probe)

    def reset(problem: Problem, key: int) -> tuple[ObjectEpisode, list[Message]]:
        instance = factory()
        said = _called(instance.reset, deadline, _row(instance.reset, problem))
        return ObjectEpisode(instance), _with_text(opening(problem), said, name)

    def value(state: ObjectEpisode) -> float:
        return _called(state.instance.get_reward, deadline, {}) if reward is None else reward(state.instance)

    def step(state: ObjectEpisode, message: Message) -> Turn:
        state.turns += 1
        calls = parse(message["content"])
        own = [_forgiving(tool, getattr(state.instance, tool.name), deadline) for tool in listed]
        results = tools.results(own, calls)
        said = tools.answers(calls, results)
        info = {"tool_calls": len(calls), "tool_errors": sum(result.failed for result in results),
                "malformed": any(call.error for call in calls), "action": tools.identity(calls) if calls else None}
        if calls and state.turns < turns:
            return Turn(said, info=info)
        return Turn(said, value(state), True, info)

    schemas = tuple(tool.schema for tool in listed)
    return Environment(name=name, task=task, reset=reset, step=step, cut=value, tools=schemas, calls=described(schemas, parser),
                       returns=returns, replayable=replayable,
                       waits=any(inspect.iscoroutinefunction(tool.call) for tool in listed),
                       facts={"tool_calls": "count", "tool_errors": "count", "malformed": "any"})


def _tools(instance: Any) -> list[tools.Tool]:
    """A tool for each public method of the class except `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)
             if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [tools.of_function(getattr(instance, name)) for name in names]


def _forgiving(tool: tools.Tool, method: Callable[..., Any], deadline: float) -> tools.Tool:
    """The tool with this method, whose exceptions are errors that the policy reads."""
    def call(**arguments):
        try:
            return _called(method, deadline, arguments)
        except Late:
            raise
        except Exception as error:
            raise tools.ToolError(str(error)) from error

    return dataclasses.replace(tool, call=call)


def _called(method: Callable[..., Any], deadline: float, arguments: Mapping[str, Any]) -> Any:
    """The value of a method. Raises Late if it is asynchronous and takes more than `deadline` seconds."""
    value = method(**arguments)
    return wait(value, deadline, value.__qualname__) if inspect.iscoroutine(value) else value


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

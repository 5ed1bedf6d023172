"""Tasks with one answer in which the policy may call tools before it answers."""
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.environments import call_kinds
from jaxrl_llm.environments import tools as tool_room
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.calculator import calculator
from jaxrl_llm.environments.described import described
from jaxrl_llm.environments.endings import CHECK, LAST, Endings, is_void
from jaxrl_llm.environments.endings import check as check_endings
from jaxrl_llm.environments.parsers import WRITERS, named_parser
from jaxrl_llm.environments.python_tool import python
from jaxrl_llm.environments.search import search
from jaxrl_llm.environments.single import ideal, opening, reader, scorer
from jaxrl_llm.environments.tools import Call, Result, Tool
from jaxrl_llm.rewards.math import last_boxed
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools import registry

TOOLS = registry.PartTable("tool", Tool)
for _factory in (calculator, python, search):
    TOOLS.enter(_factory)
_EXPRESSION = re.compile(r"\d+(?: ?[-+*/] ?\d+)+")
_MARKED = re.compile(r"\\boxed\{|<answer>")
FACTS = {"tool_calls": "count", "tool_errors": "count", "answer_blocks": "count", "malformed": "any", "void": "tokens",
         "tool_failed": "count", "tool_unknown": "count", "error_words": "count"}
FENCED = "Programs that you write in a ```python block are run, and you read what they print. Then give your answer."


@dataclasses.dataclass
class ToolDialogue:
    """A problem, the tools of the trajectory, how many messages the policy sent and answers it was told to check.

    `made`: the calls so far, where kinds of calls are counted. `kept`: resources that the tools keep open.
    """

    problem: Problem
    tools: Sequence[Tool]
    turns: int = 0
    checked: int = 0
    made: set[str] = dataclasses.field(default_factory=set)
    kept: Any = None


@environment
def tool_use(*, task: str = "arithmetic", options: Mapping[str, Any] | None = None,
             tools: Mapping[str, Mapping[str, Any]] | Sequence[str] = ("calculator",), parser: str = "hermes",
             reward: str | None = None, turns: int = 8, preface: Sequence[Message] = (), checks: int = 0,
             void_ends: bool = False, printed: bool = False, asks: bool = False,
             kinds: Mapping[str, str] | None = None) -> Environment:
    """A task of `jaxrl_llm.tasks` with tools, by name or by name and options (`{"search": {"path": ...}}`).

    Your own tools are "module:function", see `named_tools`, and so is your own parser, `parse(text) -> calls` as in `parsers`.
    A message that calls tools is answered by their results, calls after the first `tools.CALLS` by one error. A message without
    calls is the answer, which the task's verifier scores. A policy that still calls at the last of its `turns` gets no reward.
    `checks`, `void_ends`, `printed` and `asks` change how a dialogue ends, see `endings.Endings`. `kinds` are kinds of
    tools by name, "search" or "query", whose calls are counted as the facts `call_kinds.FACTS`.
    `preface` are messages before the problem, such as rules and an example; without them a policy whose chat template shows no
    tools reads a description. The facts of a turn are `tool_calls`; `tool_errors`, calls that failed, among them `tool_failed`,
    readable calls of a known tool, and `tool_unknown`, readable calls of an unknown one; `error_words`, results that contain
    the word "error", failed or not; `answer_blocks`, answers in a box or in `<answer>`, or read by the verifier; `malformed`,
    whether a call could not be parsed; and `void`: no readable call and no answer, or `endings.is_void` if void turns end the
    dialogue. The `action` of a turn is its calls, or the answer as the verifier reads it. Raises ValueError for unknown names,
    two tools of one name, and as many checks as turns, SandboxError if the tool `python` cannot run.
    """
    problems = tasks.make_chat(task, options)
    made = named_tools(tools)
    names = [tool.name for tool in made]
    if parser == "fenced" and names != ["python"]:
        raise ValueError(f"the parser 'fenced' calls the tool 'python' alone, got the tools {sorted(names)}")
    return of_tools(problems, made, name="+".join(names), parser=parser, reward=reward, turns=turns, preface=preface,
                    endings=Endings(checks, void_ends, printed, asks), kinds=kinds or {})


def named_tools(named: Mapping[str, Mapping[str, Any]] | Sequence[str]) -> list[Tool]:
    """Tools by name or by name and options. "module:function" is your own function with types, or one that returns a `Tool`.

    The second is annotated with `-> Tool` and takes the options. Raises ValueError for unknown names and options, for something
    that is no tool, and for two tools of one name.
    """
    chosen = named if isinstance(named, Mapping) else dict.fromkeys(named, {})
    made = [_own(name, given) if ":" in name else TOOLS.make(name, **given)
            for name, given in chosen.items()]
    names = [tool.name for tool in made]
    if len(set(names)) < len(names):
        raise ValueError(f"the tools {list(chosen)} have the names {names}; give each a name of its own")
    return made


def _own(target: str, options: Mapping[str, Any]) -> Tool:
    function = registry.function_of("tool", target)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"tool {target!r} is no function, or an asynchronous one; the environment `methods_of` takes a class, "
                         "whose methods are tools and may be asynchronous")
    if typing.get_type_hints(function).get("return") is Tool:
        return registry.own("tool", target, dict(options), Tool)
    if options:
        raise ValueError(f"tool {target!r} is called by the policy and takes no options, got {sorted(options)}; options go to "
                         "a function that returns a Tool, annotated with -> Tool")
    return tool_room.of_function(function)


def of_tools(problems: Task, tools: Sequence[Tool], *, name: str, parser: str, reward: str | None, turns: int,
             preface: Sequence[Message] = (), opened: Callable[[], tuple[Sequence[Tool], Any]] | None = None,
             replayable: bool = True, waits: bool = False, endings: Endings = Endings(),
             kinds: Mapping[str, str] = types.MappingProxyType({})) -> Environment:
    """The environment of a task and tools, as in `tool_use`; `name` is appended to the task's name.

    `opened` makes tools for each trajectory, with the same schemas, and an object that is kept as long as the trajectory.
    """
    check_endings(endings, turns)
    call_kinds.check(kinds, [tool.name for tool in tools])
    fenced, verifier = parser == "fenced", reward or problems.reward
    step = functools.partial(_step, parse=named_parser(parser), read=reader(verifier), limit=turns, endings=endings,
                             score=scorer(verifier, problems.train, problems.heldout), kinds=kinds,
                             role="user" if fenced else "tool")

    def reset(problem: Problem, key: int) -> tuple[ToolDialogue, list[Message]]:
        rules = [{"role": "system", "content": FENCED}] if fenced else []
        own, kept = (tools, None) if opened is None else opened()
        return ToolDialogue(problem, own, kept=kept), [*rules, *preface, *opening(problem)]

    schemas = () if fenced else tuple(tool.schema for tool in tools)
    calculates = turns > 1 and any(tool.name == "calculator" for tool in tools)
    return Environment(
        name=f"{problems.name}+{name}", task=problems, reset=reset, step=step, replayable=replayable,
        **({"waits": waits} | tool_room.pace(tools)), tools=schemas, facts=FACTS | (call_kinds.FACTS if kinds else {}),
        last=LAST if endings.asks else "", calls="" if preface else described(schemas, parser),
        oracle=lambda state: _ideal(verifier, state, parser if calculates else ""),
        choices=lambda state: ['<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>',
                               '<tool_call>{"name": "nothing"}</tool_call>', "```python\nprint(1)\n```", "7"])


def _ideal(reward: str, state: ToolDialogue, parser: str) -> str:
    """The answer; before it a call of the calculator, if a parser is given and the problem contains an expression."""
    return (None if state.turns else call_of(state.problem, parser)) or ideal(reward, state.problem)


def call_of(problem: Problem, parser: str) -> str | None:
    """A call of the calculator with the expression in a problem; None without one, and for parsers that read no such call."""
    match = _EXPRESSION.search(opening(problem)[-1]["content"])
    write = None if parser == "fenced" else WRITERS.get(parser)
    return None if match is None or write is None else write("calculator", {"expression": match[0]})


def _step(state: ToolDialogue, message: Message, *, parse: Callable[[str], list[Call]], score: Callable[[str, Problem], float],
          read: Callable[[str], Hashable | None], limit: int, role: str, endings: Endings, kinds: Mapping[str, str]) -> Turn:
    state.turns += 1
    text, calls = message["content"], parse(message["content"])
    info = _said(text, calls, None if calls else read(text))
    if kinds:
        info |= call_kinds.counted(calls, kinds, state.made)
    if endings.void:
        info["void"] = is_void(text, calls)
        if info["void"]:
            return Turn(reward=0.0 if calls else score(text, state.problem), done=True, info=info)
    if not calls:
        return _answered(state, text, info, score, limit, endings)
    if state.turns >= limit and not endings.printed:
        return Turn(done=True, info={**info, "out_of_turns": True})
    results = tool_room.results(state.tools, calls)
    info |= _made(calls, results, {tool.name for tool in state.tools})
    seen = "\n".join([text, *(result.text for result in results)])
    if endings.printed and last_boxed(seen) is not None:
        return _answered(state, seen, info, score, limit, endings)
    if state.turns >= limit:
        return Turn(done=True, info={**info, "out_of_turns": True})
    said = tool_room.answers(calls, results, role)
    if endings.asks and state.turns == limit - 1:
        said[-1]["content"] += f"\n{LAST}"
    return Turn(said, info=info)


def _answered(state: ToolDialogue, text: str, info: Mapping[str, Any], score: Callable[[str, Problem], float], limit: int,
              endings: Endings) -> Turn:
    """The end of the dialogue with this answer, or the request to check it."""
    if state.checked < endings.checks and state.turns < limit:
        state.checked += 1
        return Turn([{"role": "user", "content": CHECK}], info=info)
    return Turn(reward=score(text, state.problem), done=True, info=info)


def _said(text: str, calls: Sequence[Call], answer: Hashable | None) -> dict[str, Any]:
    """The facts of a message whose calls have not been made."""
    marked, answered = len(_MARKED.findall(text)), answer is not None
    action = tool_room.identity(calls) if calls else None if answer is None else f"answer {answer}"
    return {"action": action, "tool_calls": len(calls), "tool_errors": 0, "answer_blocks": marked or int(answered),
            "malformed": any(call.error for call in calls),
            "void": not (answered or marked or any(not call.error for call in calls)), "tool_failed": 0, "tool_unknown": 0,
            "error_words": 0}


def _made(calls: Sequence[Call], results: Sequence[Result], names: Collection[str]) -> dict[str, int]:
    """The facts of calls that were made of tools with these names."""
    failed = [call for call, result in zip(calls, results) if result.failed]
    return {"tool_errors": len(failed), "tool_failed": sum(not call.error and call.name in names for call in failed),
            "tool_unknown": sum(not call.error and call.name not in names for call in failed),
            "error_words": sum("error" in result.text.lower() for result in results)}  # failed calls for rStar2-Agent's code

"""Tools with a memory instead of the history: every call begins a new context (MemSearcher, arXiv 2511.02805)."""
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.environments import tools as tool_room
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.described import described
from jaxrl_llm.environments.parsers import named_parser
from jaxrl_llm.environments.single import ideal, opening, reader, scorer
from jaxrl_llm.environments.tool_use import call_of, named_tools
from jaxrl_llm.environments.tools import Call, Tool
from jaxrl_llm.tasks.base import Problem

ASKED = "Write what you need to remember between <memory> and </memory>."
_MEMORY = re.compile(r"<memory>((?:(?!<memory>).)*)</memory>", re.DOTALL)


@dataclasses.dataclass
class MemoryDialogue:
    """A problem, the memory, contexts so far, and the tools' answers that the policy must still memorise ("": none)."""

    problem: Problem
    memory: str = ""
    contexts: int = 1
    said: str = ""


@environment
def memory_use(*, task: str = "arithmetic", options: Mapping[str, Any] | None = None,
               tools: Mapping[str, Mapping[str, Any]] | Sequence[str] = ("calculator",), parser: str = "hermes",
               reward: str | None = None, contexts: int = 5) -> Environment:
    """A task of `jaxrl_llm.tasks` with tools, whose contexts begin with only the problem and a memory.

    In each context the policy calls tools, reads their answers and writes a memory, with which the next context begins; or it
    answers, and the task's verifier scores the answer. A trajectory ends without a reward if a message neither calls nor
    answers, if a requested memory is missing, or if the last of the `contexts` has no answer. Raises ValueError for unknown
    names and fewer than two contexts, SandboxError if the tool `python` cannot run.
    """
    if contexts < 2:
        raise ValueError(f"contexts={contexts}; give two at least, or take `tool_use`, which keeps what was said")
    problems = tasks.make_chat(task, options)
    made = named_tools(tools)
    name = reward or problems.reward
    step = functools.partial(_step, parse=named_parser(parser), tools=made, read=reader(name), limit=contexts,
                             score=scorer(name, problems.train, problems.heldout))
    schemas = tuple(tool.schema for tool in made)
    return Environment(
        name="+".join([problems.name, *(tool.name for tool in made), "memory"]), task=problems,
        reset=lambda problem, key: (MemoryDialogue(problem), list(opening(problem))), step=step,
        tools=schemas, calls=described(schemas, parser), contexts=contexts, **tool_room.pace(made),
        oracle=lambda state: _ideal(name, state, parser),
        choices=lambda state: [f"<memory>{state.said}</memory>", "7", "nothing"])


def _ideal(reward: str, state: MemoryDialogue, parser: str) -> str:
    """A call, its result as the memory, then the answer; without anything to call, the answer at once."""
    if state.said:
        return f"<memory>{state.said}</memory>"
    return (call_of(state.problem, parser) if not state.memory else None) or ideal(reward, state.problem)


def _step(state: MemoryDialogue, message: Message, *, parse: Callable[[str], list[Call]], tools: Sequence[Tool],
          score: Callable[[str, Problem], float], read: Callable[[str], Hashable | None], limit: int) -> Turn:
    text = message["content"]
    if state.said:
        memories = _MEMORY.findall(text)
        if not memories:
            return Turn(done=True, info={"format_failure": True})
        state.memory, state.said, state.contexts = memories[-1].strip(), "", state.contexts + 1
        return Turn([{"role": "user", "content": f"Memory: {state.memory}"}], fresh=True)
    calls = parse(text)
    if not calls and read(text) is not None:
        return Turn(reward=score(text, state.problem), done=True)
    if all(call.error for call in calls) or state.contexts == limit:
        return Turn(done=True, info={"format_failure": all(call.error for call in calls)})
    said = tool_room.answers(calls, tool_room.results(tools, calls))
    state.said = "\n".join(one["content"] for one in said) or "(nothing)"
    said[-1]["content"] += f"\n{ASKED}"
    return Turn(said)

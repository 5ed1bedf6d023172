"""Prompts with checkable answers. `make` a task by name; `loader.batches` shuffles, shards and batches its problems."""
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.tasks.arithmetic import arithmetic
from jaxrl_llm.tasks.attempts import attempts
from jaxrl_llm.tasks.base import Part, Problem, ProblemSource, Task, text_of
from jaxrl_llm.tasks.dataset import dataset, jsonl
from jaxrl_llm.tasks.edits import edits
from jaxrl_llm.tasks.grounding import grounding
from jaxrl_llm.tasks.mixture import mixture
from jaxrl_llm.tasks.reasoning_gym_task import reasoning_gym
from jaxrl_llm.tasks.styles import styles
from jaxrl_llm.tasks.word_problems import word_problems
from jaxrl_llm.tools import registry

__all__ = ["FACTORIES", "Part", "Problem", "ProblemSource", "Task", "make", "make_chat", "mixture", "text_of"]

FACTORIES: dict[str, registry.Factory] = {}
for _factory in (arithmetic, attempts, dataset, jsonl, reasoning_gym, grounding, edits, styles, word_problems):
    registry.register(FACTORIES, "task", _factory)


def make(name: str, **options) -> Task:
    """The task of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, or if your function does not return a Task.
    """
    return registry.make(FACTORIES, "task", name, options, Task)


def make_chat(name: str, options: Mapping[str, Any] | None) -> Task:
    """The task of that name as conversations ask it: without `options`, arithmetic is in messages. Errors as in `make`."""
    return make(name, **({"chat": True} if options is None and name == "arithmetic" else options or {}))

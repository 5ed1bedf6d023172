"""Prompts with checkable answers. `make` a task by name; `loader.batches` shuffles, shards and batches its problems."""
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.tasks.base import TASKS, Part, Problem, ProblemSource, Task, task, text_of
from jaxrl_llm.tasks.mixture import mixture
from jaxrl_llm.tools import registry

__all__ = ["TASKS", "Part", "Problem", "ProblemSource", "Task", "make", "make_chat", "mixture", "task", "text_of"]

registry.discover(__name__, __path__)


def make(name: str, **options) -> Task:
    """The task of that name, or of your own "module:function".

    Raises ValueError with the nearest match for an unknown name or option, or if your function does not return a Task.
    """
    return TASKS.make(name, **options)


def make_chat(name: str, options: Mapping[str, Any] | None) -> Task:
    """The task of that name as conversations ask it: without `options`, arithmetic is in messages. Errors as in `make`."""
    return make(name, **({"chat": True} if options is None and name == "arithmetic" else options or {}))

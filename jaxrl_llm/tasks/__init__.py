"""Prompts with checkable answers. `make` a task by name; `loader.batches` shuffles, shards and batches its problems."""

from jaxrl_llm import registry
from jaxrl_llm.tasks.arithmetic import arithmetic
from jaxrl_llm.tasks.base import Problem, Source, Task, text_of
from jaxrl_llm.tasks.jsonl import jsonl
from jaxrl_llm.tasks.reasoning_gym_task import reasoning_gym
from jaxrl_llm.tasks.tfds import tfds

__all__ = ["FACTORIES", "Problem", "Source", "Task", "make", "text_of"]

FACTORIES: dict[str, registry.Factory] = {}
for _factory in (arithmetic, jsonl, reasoning_gym, tfds):
    registry.register(FACTORIES, "task", _factory)


def make(name: str, **options) -> Task:
    """The task of that name; ValueError with the nearest match for an unknown name or option."""
    return registry.make(FACTORIES, "task", name, options)

"""Traces of a task's problems in files: those that others wrote, and right completions of an earlier run's samples.

    {"prompt": "3+4=", "completion": "3+4 is 7.", "correct": true}      # a line of a file of traces
"""
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.tasks import jsonl
from jaxrl_llm.tasks.base import Problem, Task, text_of
from jaxrl_llm.tools import memo

WORDS = ("completion", "response", "text")  # keys of what a trace says
RIGHT = ("solved", "correct")  # keys of whether it is right


def lines_of(path: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """`(file and line, object)` of a JSONL file, or of all samples of the folder of a run.

    Raises ValueError for a path that is neither.
    """
    place = Path(path).expanduser()
    files = sorted((place / "samples").glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"traces={path!r} is no file, and no folder of a run with samples; give a JSONL file of traces, or "
                         "the folder of a run with samples_every above 0")
    return tuple(line for file in files for line in _lines(str(file), file.stat().st_mtime_ns))


@memo.remembered(64)
def _lines(file: str, changed: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The lines of a file that was changed last at this time."""
    return tuple((f"{file}, line {number}", record) for number, record in jsonl.read(file))


def found_traces(path: str, task: Task) -> dict[int, list[dict[str, Any]]]:
    """The right traces of a file, or of the samples of a run, by the ids of the training problems that they are of.

    A trace belongs to a problem with its answer whose question is in its prompt, or to one of exactly this prompt. Those that
    are said to be wrong are left out, as are repeated ones. Of a conversation with an environment the first message counts.
    Raises ValueError with the place of a line without a prompt or without words, and if no line is of a problem of the task.
    """
    answered, asked, found = _index(task.train[i] for i in range(len(task.train)))
    lines = lines_of(path)
    for where, record in lines:
        prompt, words = _words(record, where)
        if not all(record.get(key, True) for key in RIGHT):
            continue
        problem = asked.get(prompt) or max(
            (one for one in answered.get(str(record.get("answer")), ()) if _question(one) in prompt),
            key=lambda one: len(_question(one)), default=None)
        if problem is not None and words not in [one["text"] for one in found[problem.id]]:
            found[problem.id].append({"text": words, "correct": True})
    if not any(found.values()):
        raise ValueError(f"traces={path!r}: none of {len(lines)} lines is a right trace of a training problem of task "
                         f"{task.name!r}, the first is {str(lines[0][1])[:200] if lines else 'missing'}; give traces of this "
                         "task, with the 'prompt' of a problem, or a part of one with its 'answer'")
    return {number: traces for number, traces in found.items() if traces}


def _index(problems: Iterable[Problem]) -> tuple[dict[str, list[Problem]], dict[str, Problem], dict[int, list[dict[str, Any]]]]:
    """Problems by their answers and by their prompts, and an empty list for each."""
    answered, asked, found = defaultdict[str, list[Problem]](list), dict[str, Problem](), dict[int, list[dict[str, Any]]]()
    for problem in problems:
        answered[problem.answer].append(problem)
        asked.setdefault(text_of(problem), problem)
        found[problem.id] = []
    return answered, asked, found


def _question(problem: Problem) -> str:
    """The words of a problem that its prompt has in whatever template: those of its last message."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


def _words(record: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The prompt and the words of a trace."""
    messages = record.get("messages")
    said = messages[0].get("content") if isinstance(messages, list) and messages and isinstance(messages[0], dict) else next(
        (record[key] for key in WORDS if key in record), None)
    for name, value in (("prompt", record.get("prompt")), ("completion", said)):
        if not isinstance(value, str) or not (value or name == "completion"):
            raise ValueError(f"{where}: {name!r} is {str(value)[:80]!r}; give each trace a 'prompt' and a 'completion', both "
                             "texts")
    return record["prompt"], str(said)

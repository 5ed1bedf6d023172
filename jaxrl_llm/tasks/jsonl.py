"""Problems from JSONL files: one object a line with `prompt` (text) or `messages` (chat), and `answer`."""

import json
import os

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, split_position, text_of

RESERVED = ("prompt", "messages", "answer", "level")


def jsonl(*, path: str, heldout_path: str | None = None, heldout_fraction: float = 0.2) -> Task:
    """The task in a JSONL file; held out is a second file, or the share of the first whose prompt hash is small.

    Every line is an object with `answer` and exactly one of `prompt` and `messages`; `level` is optional and other
    keys go to `Problem.extra`. Raises ValueError with file name and line number for a malformed line, and for an
    empty file or a prompt that is in both files.
    """
    train = read_problems(path)
    if heldout_path is None:
        sides: tuple[list, list] = ([], [])
        for problem in train:
            sides[split_position(text_of(problem)) < heldout_fraction].append(problem)
        train, heldout = sides
    else:
        heldout = read_problems(heldout_path)
        shared = {text_of(problem) for problem in train} & {text_of(problem) for problem in heldout}
        if shared:
            raise ValueError(f"{len(shared)} prompts are in both {path} and {heldout_path}, for example "
                             f"{min(shared)[:100]!r}; remove them from one of the files")

    def build(item: Problem, number: int) -> Problem:
        return Problem(item.prompt, item.answer, number, item.level, item.extra)

    return disjoint_task(f"jsonl/{os.path.basename(path)}", train, heldout, build, reward="boxed")


def read_problems(path: str) -> list[Problem]:
    """All problems of a file in order (blank lines aside), ids from 0; ValueError naming file and line."""
    problems = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                problems.append(_problem(json.loads(line.decode("utf-8-sig")), len(problems)))
            except ValueError as error:  # includes JSON and UTF-8 decoding errors
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise ValueError(f"{path} holds no problems; expected one JSON object a line with 'prompt' or 'messages', and "
                         "'answer'")
    return problems


def _problem(record, number: int) -> Problem:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    if ("prompt" in record) == ("messages" in record):
        raise ValueError(f"expected exactly one of 'prompt' and 'messages', got keys {sorted(record)}")
    if "answer" not in record:
        raise ValueError(f"'answer' is missing, got keys {sorted(record)}")
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)) or answer == "":
        raise ValueError(f"'answer' must be a non-empty string or an integer, got {answer!r}")
    prompt = _messages(record["messages"]) if "messages" in record else record["prompt"]
    if not isinstance(prompt, (str, tuple)) or not prompt:
        raise ValueError(f"'prompt' must be a non-empty string, got {prompt!r}")
    extra = {key: value for key, value in record.items() if key not in RESERVED}
    return Problem(prompt, str(answer), number, str(record.get("level", "")), extra)


def _messages(messages) -> tuple[dict[str, str], ...]:
    well_formed = isinstance(messages, list) and messages and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages)
    if not well_formed:
        raise ValueError("'messages' must be a non-empty list of objects with the strings 'role' and 'content'")
    return tuple(messages)

"""Problems from JSONL files: one object a line with `prompt` (text) or `messages` (chat), and `answer`."""

import json
import os
import unicodedata
import warnings
from typing import Any

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, split_position, text_of

RESERVED = ("prompt", "messages", "answer", "level")
MAX_DEPTH = 100  # of lists and objects in each other, for what later walks through `extra` by recursion


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
    """All problems of a file in order (blank lines aside), ids from 0; ValueError naming file and line.

    A key that an object has twice is warned of, and the last one counts.
    """
    problems, twice = [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record, repeated = parse(line.decode("utf-8-sig"))
                problems.append(_problem(record, len(problems)))
            except ValueError as error:  # includes JSON and UTF-8 decoding errors
                raise ValueError(f"{path}, line {number}: {error}") from error
            twice += [(number, key) for key in repeated]
    if twice:
        lines = len({number for number, _ in twice})
        warnings.warn(f"{path}, line {twice[0][0]}: the key {twice[0][1]!r} is given twice, the last one counts"
                      + (f" (and so in {lines - 1} further lines)" if lines > 1 else ""), RuntimeWarning, stacklevel=2)
    if not problems:
        raise ValueError(f"{path} holds no problems; expected one JSON object a line with 'prompt' or 'messages', and "
                         "'answer'")
    return problems


def parse(text: str) -> tuple[Any, list[str]]:
    """The value of a JSON text, and the keys that some object in it has twice.

    Raises ValueError for what JSON does not allow (NaN, Infinity), for halves of surrogate pairs, which are no text, and for
    values nested deeper than `MAX_DEPTH`.
    """
    repeated: list[str] = []

    def build(pairs):
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return made

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text.lower():  # decoded from UTF-8, it can have surrogates in escapes alone
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"a text holds {half}, half of a surrogate pair, which is no character; write the character or "
                             "remove it") from None
    return value, repeated


def _refuse(name: str):
    raise ValueError(f"{name} is no JSON; write null, a number or a text")


def _depth(value) -> int:
    depth, layer = 0, [value]
    while layer := [x for x in layer if isinstance(x, (dict, list))]:
        depth, layer = depth + 1, [y for x in layer for y in (x.values() if isinstance(x, dict) else x)]
    return depth


def _is_blank(text: str) -> bool:
    """Whether nothing of it can be seen: spaces, control and format characters."""
    return all(unicodedata.category(c)[0] in "ZC" for c in text)


def _problem(record, number: int) -> Problem:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    if ("prompt" in record) == ("messages" in record):
        raise ValueError(f"expected exactly one of 'prompt' and 'messages', got keys {sorted(record)}")
    if "answer" not in record:
        raise ValueError(f"'answer' is missing, got keys {sorted(record)}")
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)) or _is_blank(str(answer)):
        raise ValueError(f"'answer' must be a string with something to see in it or an integer, got {answer!r}: an empty "
                         "completion would be right")
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

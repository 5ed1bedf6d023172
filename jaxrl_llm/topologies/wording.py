"""Other words around a problem, which the policy reads in place of its prompt: a hint, examples, an earlier answer.

    ids = fitting(encode, worded(problem, "Hint: {hint}\\n{prompt}", hint="primes"), 512)
    Begin(row, 2, reads=ids)
"""
import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.forest import Forest, chains, trim
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Messages, Problem
from jaxrl_llm.tools.registry import Conflict

Encode = Callable[[Problem], list[int]]  # the value "encode" of a run: token ids of a problem's prompt
TASK_ALONE = Conflict(("environment",), "the {part} words prompts of tasks anew, and environment {0.name!r} opens with other "
                      "words", "take a task in its place, or another method, for example grpo")
WHOLE = Conflict(("filters.refills",), "the {part} replaces rollouts once a batch is complete, and the filter {0!r} reads them "
                 "before that, in several parts of a batch", "leave one of the two out")


def template_of(text: str, *needed: str) -> str:
    """A template, or that of a file whose name ends with .txt. Raises ValueError if it lacks one of the `needed` fields."""
    path = Path(text).expanduser()
    if text.endswith(".txt"):
        if not path.is_file():
            raise ValueError(f"template={text!r} is no file; give the path of one, or the words themselves")
        text = path.read_text(encoding="utf-8")
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise ValueError(f"template={text!r}: {error}; write {{{{ and }}}} for braces of the words") from error
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"template={text!r} has the fields {sorted(fields)}, without {missing[0]!r}; write {{{missing[0]}}} "
                         "where it belongs")
    return text


def words_of(problem: Problem) -> str:
    """What a problem asks: its text, or the last message of the user."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return problem.prompt[_asking(problem.prompt)]["content"]


def worded(problem: Problem, template: str, **fields: str) -> Problem:
    """The problem in the words of a template, whose `{prompt}` is what it asks.

    Other fields are the given ones, or those of `Problem.extra`. Of messages the last one of the user has these words. Raises
    ValueError with the place of the problem for a field that it lacks.
    """
    try:
        text = template.format_map({**problem.extra, "answer": problem.answer, **fields, "prompt": words_of(problem)})
    except KeyError as error:
        raise ValueError(f"{problem.place or f'problem {problem.id}'} has no field {error.args[0]!r}, which a template has; "
                         f"it has {', '.join(sorted({'prompt', 'answer', *problem.extra, *fields}))}") from error
    if isinstance(problem.prompt, str):
        return dataclasses.replace(problem, prompt=text)
    at = _asking(problem.prompt)
    asking = {**problem.prompt[at], "content": text}
    return dataclasses.replace(problem, prompt=(*problem.prompt[:at], asking, *problem.prompt[at + 1:]))


def fitting(encode: Encode, problem: Problem, most: int) -> list[int]:
    """Token ids of a problem's prompt; none if they are more than `most`."""
    ids = encode(problem)
    return ids if len(ids) <= most else []


def longer(inner: Any, own: Any) -> Any:
    """`Topology.reads` of a topology that reads its `own` texts, as one that it wraps may do.

    Raises ValueError if both read some, and one of them does not declare a number.
    """
    if not inner or not own:
        return own or inner
    if callable(inner) or callable(own):
        raise ValueError("two topologies let the policy read other words, and one of them does not say how long they are; "
                         "leave one of the two out")
    return max(inner, own)


def elsewhere(forest: Forest) -> np.ndarray:
    """bool[R], trajectories that the policy wrote in part under other words, in the order of `ends`."""
    node, row = chains(forest, forest.leaves)
    which, last = forest.finals
    return np.bincount(which[row], forest.role[node] == Role.ELSEWHERE, minlength=len(last)) > 0


def under_prompts(forest: Forest) -> Forest:
    """The forest without the trajectories that were written under other words, as a topology that is wrapped sees it."""
    apart = elsewhere(forest)
    return trim(forest, ~apart) if apart.any() else forest


def nearest(words: str, documents: Sequence[str], count: int, *, k1: float = 1.5, b: float = 0.75) -> list[int]:
    """The numbers of the `count` documents that are nearest to some words by BM25, the nearest first; ties: the first.

    `score(d) = sum over words w of log(1 + (N - n_w + 1/2) / (n_w + 1/2)) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))`, f
    the number of times that w is in d, n_w the documents that have it. Documents without a common word come last.
    """
    bags = [Counter(_words(text)) for text in documents]
    sizes = [sum(bag.values()) for bag in bags]
    mean = max(sum(sizes) / max(len(sizes), 1), 1)
    scores = np.zeros(len(bags))
    for word in {*_words(words)}:
        having = sum(word in bag for bag in bags)
        rarity = math.log1p((len(bags) - having + 0.5) / (having + 0.5))
        for n, (bag, size) in enumerate(zip(bags, sizes)):
            scores[n] += rarity * bag[word] * (k1 + 1) / (bag[word] + k1 * (1 - b + b * size / mean))
    return np.argsort(-scores, kind="stable")[:count].tolist()


def remember(kept: list[Any], new: dict[str, str], most: int) -> None:
    """Puts an example at the end of a list, in the place of one of the same problem; the oldest beyond `most` are dropped."""
    kept[:] = [*(one for one in kept if one["prompt"] != new["prompt"]), new][-most:]


def _asking(messages: Messages) -> int:
    """The place of the last message of the user; without one, of the last message."""
    return max((n for n, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)


def _words(text: str) -> list[str]:
    """Words and numbers in lower case."""
    return re.findall(r"\w+", text.lower())

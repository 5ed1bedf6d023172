"""Hints: what the policy may read beside a problem, from its data or from the beginning of a trace."""
import re

from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import traces_of, useful


def hint_of(problem: Problem, share: float, key: str = "hint") -> str:
    """`extra[key]`, or else the first `share` of the characters of the first trace that may be right, in whole words; "": none.

    Of a trace of messages the words of the assistant count. Without other traces the answer is one.
    """
    if key in problem.extra:
        return str(problem.extra[key])
    number = next(iter(useful(problem)), None)
    return "" if number is None else begun(said(problem, number), share)


def said(problem: Problem, number: int) -> str:
    """The words of a trace of a problem; of messages those of the assistant."""
    words = traces_of(problem)[number].words
    return words if isinstance(words, str) else "\n".join(
        str(message["content"]) for message in words if message["role"] == "assistant")


def begun(text: str, share: float) -> str:
    """The first `floor(share * characters)` of a text, without the last word if that is cut and is not the only one."""
    count = int(share * len(text) + 1e-6)
    first = text[:count]
    if 0 < count < len(text) and not text[count].isspace() and re.search(r"\s", first):
        first = re.sub(r"\S+$", "", first)
    return first.strip()


def tells(problem: Problem, hint: str) -> bool:
    """Whether a hint contains the answer of its problem, as a word of its own."""
    answer = problem.answer.strip()
    return bool(answer) and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", hint) is not None

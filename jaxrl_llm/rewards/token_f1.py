r"""Partial credit for answers in words: F1 of the last `\boxed{}` and the answer (MemSearcher, arXiv 2511.02805)."""
import re
from collections import Counter

from jaxrl_llm.rewards.math import last_boxed
from jaxrl_llm.rewards.spelling import normalise

_COMMAND, _WORD = re.compile(r"\\[A-Za-z]+"), re.compile(r"\w+")


def words(text: str) -> tuple[str, ...]:
    r"""The words and numbers of a text in small letters, without punctuation and commands such as `\text`."""
    return tuple(_WORD.findall(_COMMAND.sub(" ", normalise(text)).casefold()))


def find_words(completion: str) -> tuple[str, ...] | None:
    r"""The words of the last `\boxed{}`; None where there are none."""
    return words(last_boxed(completion) or "") or None


def token_f1(completion: str, answer: str, problem) -> float:
    r"""`2 c / (words of the box + words of the answer)`, c the common ones, each as often as both have it; 0 without a box.

    It is the maximum over the answer and `problem.extra["answers"]`, if there are any.
    """
    predicted, best = Counter(find_words(completion) or ()), 0.0
    for reference in (answer, *problem.extra.get("answers", ())):
        expected = Counter(words(reference))
        both = predicted.total() + expected.total()
        best = max(best, 2 * (predicted & expected).total() / both if both else 0.0)
    return best

"""The word in a message that names an action."""
import functools
import re
from collections.abc import Sequence

# Around digits that are a whole number of their own: no part of -1, 1.5, .5 or a longer number.
BEFORE_DIGITS, AFTER_DIGITS = r"(?<![0-9])(?<![0-9]\.)(?<!(?<!\S)\.)(?<!(?<!\w)[-\u2212])", r"(?![0-9]|\.[0-9])"


def last_word(words: Sequence[str], text: str) -> int:
    """The number of the last of the words in a text; -1 if it names none.

    Case counts only where two words differ by nothing else. A part of a longer word or number is none.
    """
    fold = _folds(tuple(words))
    matches = _pattern(tuple(words)).findall(text.lower() if fold else text)
    return _numbers(tuple(words))[matches[-1]] if matches else -1


@functools.cache
def _folds(words: tuple[str, ...]) -> bool:
    return len({word.lower() for word in words}) == len(set(words))


@functools.cache
def _numbers(words: tuple[str, ...]) -> dict[str, int]:
    return {word.lower() if _folds(words) else word: number for number, word in reversed([*enumerate(words)])}


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern:
    return re.compile("|".join(map(_alone, sorted(_numbers(words), key=len, reverse=True))))


def _alone(word: str) -> str:
    """The pattern of a word that is no part of another one."""
    before, after = BEFORE_DIGITS if word[:1].isdigit() else "", AFTER_DIGITS if word[-1:].isdigit() else ""
    return rf"{before}(?<!\w){re.escape(word)}(?!\w){after}"

"""Verifiers that need only the text: exact string, last number, whole-answer number, and the shape of the text."""

import re
from fractions import Fraction

from jaxrl_llm.rewards.rational import last_number as find_last_number
from jaxrl_llm.rewards.rational import parse_rational


def exact(completion: str, answer: str, problem) -> float:
    """1 when the completion equals the answer, white space at both ends aside."""
    return float(completion.strip() == answer.strip())


def whole_text(completion: str) -> str | None:
    """The completion without white space at both ends; None when nothing is left."""
    return completion.strip() or None


def last_number(completion: str, answer: str, problem) -> float:
    """1 when the last number of the completion equals the answer as a rational (1,000 = 1000, 0.50 = 1/2).

    Raises ValueError when the reference answer is not a number.
    """
    return float(find_last_number(completion) == reference_number(answer, "last_number"))


def numeric(completion: str, answer: str, problem) -> float:
    """1 when the whole completion is one number equal to the answer as a rational.

    Raises ValueError when the reference answer is not a number.
    """
    return float(parse_rational(completion) == reference_number(answer, "numeric"))


def reference_number(answer: str, verifier: str) -> Fraction:
    """The reference as a rational; ValueError when it is not one."""
    value = parse_rational(answer)
    if value is None:
        raise ValueError(f"{verifier} needs a number as reference answer, got {answer!r}; "
                         "use 'exact' for words or 'boxed' for expressions")
    return value


def format_match(pattern: str):
    """A score function: 1 when the regular expression matches the whole completion (dot matches newlines)."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(completion: str, answer: str, problem) -> float:
        return float(compiled.fullmatch(completion.strip()) is not None)

    return score

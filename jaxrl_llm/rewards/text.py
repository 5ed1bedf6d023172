"""Verifiers that need only the text: exact string, last number, whole-answer number, and the shape of the text."""
import re
from collections.abc import Sequence
from fractions import Fraction

import re2

from jaxrl_llm.rewards.rational import last_number as find_last_number
from jaxrl_llm.rewards.rational import parse_rational


def exact(completion: str, answer: str, problem) -> float:
    """1 when the completion equals the answer, white space at both ends aside."""
    return float(completion.strip() == answer.strip())


def through_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """The text through the stop string that is complete first; all of it without one."""
    return text[:min((text.index(stop) + len(stop) for stop in stop_strings if stop in text), default=len(text))]


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
    r"""A score function: 1 when the regular expression matches the whole completion (dot matches newlines).

    RE2 runs it: the time is linear in the completion, whatever that is. Python's `re` may need exponential time and holds
    the interpreter meanwhile. `\d \w \s` mean what they mean in `re`; word boundaries, and `\W \S` in brackets, see
    ASCII alone. Raises ValueError for what RE2 does not have: look-around, back-references, atomic groups, possessive
    repetition, more than 1,000 repeats.
    """
    options = re2.Options()
    options.dot_nl, options.log_errors = True, False
    try:
        compiled = re2.compile(_as_re2(_without_surrogates(pattern)), options)
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(
            f"the pattern {pattern!r} of the reward 'format' is no regular expression of RE2: {why}. RE2 has no look-around "
            "((?=, (?!, (?<=, (?<!), back-references, atomic groups, possessive repetition or repeats above 1,000. Write it "
            "without, or as a function of your own, run as the reward 'isolated'") from None

    def score(completion: str, answer: str, problem) -> float:
        return float(compiled.fullmatch(_without_surrogates(completion.strip())) is not None)

    return score


_TOKEN = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
_CLASSES = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\s\v\x1c-\x1f\x{85}\p{Z}"}  # the members; RE2's own are ASCII


def _as_re2(pattern: str) -> str:
    r"""A pattern of `re` as RE2 spells it: `\d \w \s \D \W \S` of Unicode, `\Z`, and `[` within a class is itself."""
    parts, inside = [], False
    for token in _TOKEN.findall(pattern):
        members = _CLASSES.get(token[1:].lower()) if token[0] == "\\" else None
        if members is not None and (token[1].islower() or not inside):
            token = members if inside else f"[{'' if token[1].islower() else '^'}{members}]"
        elif token == r"\Z":
            token = r"\z"
        elif token[0] == "[" and inside:
            token, inside = "\\" + token, not token.endswith("]")
        elif token[0] == "[":
            inside = True
        elif token == "]":
            inside = False
        parts.append(token)
    return "".join(parts)


def _without_surrogates(text: str) -> str:
    """Half a surrogate pair, which is no character and cannot be encoded, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""What a program printed or returned, compared with what is expected. Output of any length is read in linear time."""
import math
import re
from typing import Any

# A float is right within the larger of the two, as checkers of contests have it; `RELATIVE` is that of APPS.
ABSOLUTE, RELATIVE = 1e-6, 1e-5
# No two neighbours of a pattern match the same digits.
_WHOLE = re.compile(r"([+-]?)([0-9]+)")
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)")


def same_output(printed: str, expected: str) -> bool:
    """Equally many lines with equally many tokens, white space around them aside; each pair of tokens is equal.

    Tokens are equal as texts or as numbers: where the expected token is an integer (`2`, not `2.0`), exactly that integer;
    elsewhere within `ABSOLUTE` or `RELATIVE`.
    """
    left, right = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(left) == len(right) and all(len(a) == len(b) and all(map(_same_token, a, b)) for a, b in zip(left, right))


def _same_token(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if whole := _WHOLE.fullmatch(expected):
        integer = _INTEGER.fullmatch(printed)
        return integer is not None and _canonical(*integer.groups()) == _canonical(*whole.groups())
    return bool(_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)) and _close(float(printed), float(expected))


def _canonical(sign: str, digits: str) -> str:
    digits = digits.lstrip("0")
    return ("-" if sign == "-" and digits else "") + digits


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def same_value(value: Any, expected: Any) -> bool:
    """Equal JSON values of equal kinds; integers exactly, where a float is expected within `ABSOLUTE` or `RELATIVE`."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and value.keys() == expected.keys() and all(
            same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float):
        try:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and _close(value, expected)
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(value, float):
        return isinstance(expected, int) and not isinstance(expected, bool) and value == expected
    return type(value) is type(expected) and value == expected

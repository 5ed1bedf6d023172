r"""Reading exact rational numbers out of text. Nothing is evaluated; sizes are bounded before any arithmetic."""

import re
from fractions import Fraction

MAX_CHARACTERS = 200  # a longer number is no answer, and could cost unbounded time
_MINUS = "[-\u2212]"
_GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+"  # 0,100 are two numbers
_DECIMAL = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,2}}(?!\d))?"
_SLASHED = rf"{_DECIMAL}(?:\s*/\s*{_MINUS}?{_DECIMAL})?"
_PART = rf"(?:\{{\s*{_MINUS}?{_DECIMAL}\s*\}}|\d)"
# With an optional whole number in front: 1\frac{1}{2}. Two neighbours that match the same spaces would take quadratic time.
_FRAC = rf"(?:\d+\s*)?\\[dt]?frac\s*{_PART}\s*{_PART}"
NUMERAL = rf"(?:{_FRAC}|{_SLASHED})\.?"  # without its sign
# A minus after a digit, letter or bracket is a subtraction; digits glued to a letter (x2) are part of a name; digits
# around a comma that does not group by three (12,34) are no number.
_NUMBER = re.compile(rf"(?:(?<![\w.)\]}}])[-+\u2212])?(?<![\w.])(?<!\d,)(?:{_FRAC}|{_SLASHED}(?![.,]?\d|[eE]\d))")
_WHOLE = re.compile(rf"(?P<sign>[-+\u2212]?)\s*(?P<body>{_FRAC}|{_SLASHED})\.?")
_INSIDE_FRAC = re.compile(rf"(?P<whole>\d*)\s*\\[dt]?frac\s*(?P<top>{_PART})\s*(?P<bottom>{_PART})")


def _tidy(text: str) -> str:
    return text.replace("{,}", ",").replace(r"\$", "$")


def _exact(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("\u2212", "-").strip("{} "))


def parse_rational(text: str) -> Fraction | None:
    r"""The whole text as one exact number, or None: integers, decimals, `1,000`, `a/b`, `\frac{a}{b}`, `1\frac12`."""
    match = _WHOLE.fullmatch(_tidy(text).strip().strip("$").strip()) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        return None
    frac = _INSIDE_FRAC.fullmatch(match["body"])
    top, _, bottom = match["body"].partition("/") if frac is None else (frac["top"], "", frac["bottom"])
    numerator, denominator = _exact(top), _exact(bottom or "1")
    if denominator == 0:
        return None
    value = numerator / denominator + (Fraction(frac["whole"]) if frac and frac["whole"] else 0)
    return -value if match["sign"] in ("-", "\u2212") else value


def last_number(text: str) -> Fraction | None:
    r"""The last number written in the text (`a/b` and `\frac{a}{b}` count as one), or None when there is none."""
    matches = [match.group() for match in _NUMBER.finditer(_tidy(text))]
    return parse_rational(matches[-1]) if matches else None

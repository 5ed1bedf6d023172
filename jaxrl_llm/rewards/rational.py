r"""Reading exact rational numbers out of text. Nothing is evaluated; sizes are bounded before any arithmetic."""
import re
import unicodedata
from fractions import Fraction

MAX_CHARACTERS = 200  # a longer number is no answer, and could cost unbounded time
_SUPERSCRIPTS = "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_POWERS = str.maketrans(_SUPERSCRIPTS, "-0123456789")
# What people and keyboards write for a minus, a slash, a space, an apostrophe and 1/2; an em dash is no minus.
_TYPED = str.maketrans({
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"), **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " "), "\u2019": "'",
    **{sign: " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/")
       for sign in "\u00bc\u00bd\u00be\u2150\u2153\u2154\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c\u215d\u215e"}})
_SPELLED = re.compile(r"\{,\}|\\[$,!]|(?<=10)[" + _SUPERSCRIPTS + "]+")
_THIN = re.compile(r"(?<=\d)(?:\\,|[\u2007\u2009\u200a\u202f])(?=\d{3}(?!\d))")  # groups digits, as a comma does
# 0,100 are two numbers, as are 2 100 beside a third one. The last form is that of lakhs and crores.
_GROUPED = (r"(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?:'\d{3})+)|(?<!\d )[1-9]\d{0,2}(?: \d{3}(?!\d))+(?! \d)"
            r"|[1-9]\d?(?:,\d{2})+,\d{3}(?!,?\d))")
_DECIMAL = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,2}}(?!\d))?"
_TIMES = r"(?:\\cdot|\\times|[*x\u00d7\u00b7\u22c5])"
_TENS = r"10\s?\^\s?(?:\{\s?-?\d{1,3}\s?\}|-?\d{1,3}(?!\d))"
_SCALED = rf"(?:{_DECIMAL}\s?{_TIMES}\s?)?{_TENS}"
_MIXED = r"\d+ {1,2}\d+/\d+(?![./]?\d)"
_SLASHED = rf"{_DECIMAL}(?:\s*/\s*-?{_DECIMAL})?"
_PART = rf"(?:\{{\s*-?{_DECIMAL}\s*\}}|\d)"
# With an optional whole number in front: 1\frac{1}{2}. Two neighbours that match the same spaces would take quadratic time.
FRAC = rf"(?:\d+\s*)?\\[dt]?frac\s*{_PART}\s*{_PART}"
_BODY = rf"(?:{FRAC}|{_SCALED}|{_MIXED}|{_SLASHED})"
NUMERAL = rf"{_BODY}\.?"  # without its sign
# Digits glued to a letter (x2) are part of a name, those behind cm^ an exponent; digits around a comma that does not group
# (12,34) are no number.
_NUMBER = re.compile(r"(?=[\d.\\])(?<![\w.])(?<!\d,)(?<![A-Za-z}]\^)(?<![A-Za-z}]\^\{)"
                     rf"(?:{FRAC}|{_SCALED}|{_MIXED}|{_SLASHED}(?![.,]?\d|[eE]\d))")
_LISTED = re.compile(r"(?:[1-9]\d\d )+(?=[1-9]\d\d(?:\.\d+)?\Z)")
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s*[$\u20ac\u00a3]?(?P<body>{_BODY})\.?")
_INSIDEFRAC = re.compile(rf"(?P<whole>\d*)\s*\\[dt]?frac\s*(?P<top>{_PART})\s*(?P<bottom>{_PART})")
_INSIDE_MIXED = re.compile(r"(?P<whole>\d+) +(?P<top>\d+)/(?P<bottom>\d+)")
_INSIDE_SCALED = re.compile(rf"(?P<factor>.*?)\s?{_TIMES}?\s?10\s?\^\s?\{{?\s?(?P<power>-?\d+)\s?\}}?")
# What makes the number behind it negative. A minus after a digit, letter or bracket is a subtraction. A minus with a space
# behind it is a sign where a value must follow; elsewhere it is a dash, or begins an item of a list.
_NEGATIVE = re.compile(r"(?:(?:^|[^\w.)\]}])-|(?:[=(\[{<>\u2248*\u00d7:,;]|\b(?:is|equals|be)\b)[ $]*-\s*|(?<!-)\bnegative\s+)"
                       r"[$\u20ac\u00a3]?\Z")


def tidy(text: str) -> str:
    r"""The text with one spelling of signs, spaces, fractions and powers: `2½` is `2 1/2`, `1\,000` is `1,000`."""
    return _SPELLED.sub(_respelled, _THIN.sub(",", text).translate(_TYPED))


def _respelled(match: re.Match) -> str:
    found = match.group()
    fixed = {"{,}": ",", r"\,": " ", r"\!": "", r"\$": "$"}.get(found)
    return "^" + found.translate(_POWERS) if fixed is None else fixed


def _exact(text: str) -> Fraction:
    return Fraction(re.sub(r"[, '](?=\d{2})", "", text.strip("{} ")))


def parse_rational(text: str) -> Fraction | None:
    r"""The whole text as one exact number, or None.

    Integers, decimals, `1,000`, `1 000`, `a/b`, `\frac{a}{b}`, `1\frac12`, `1 1/2`, `2*10^3`.
    """
    match = _WHOLE.fullmatch(tidy(text).strip().strip("$").strip()) if len(text) <= MAX_CHARACTERS else None
    value = None if match is None else _unsigned(match["body"].strip())
    return -value if match and value is not None and match["sign"] == "-" else value


def _unsigned(body: str) -> Fraction | None:
    """The value of a numeral without a sign; None where it is divided by 0, and for 3 5/2, which are two numbers."""
    if scaled := _INSIDE_SCALED.fullmatch(body):
        return (_exact(scaled["factor"]) if scaled["factor"] else Fraction(1)) * Fraction(10) ** int(scaled["power"])
    parts = _INSIDEFRAC.fullmatch(body) or _INSIDE_MIXED.fullmatch(body)
    top, _, bottom = (parts["top"], "", parts["bottom"]) if parts else body.partition("/")
    numerator, denominator = _exact(top), _exact(bottom or "1")
    if denominator == 0 or (parts and parts.re is _INSIDE_MIXED and numerator >= denominator):
        return None
    return numerator / denominator + int(parts["whole"] or 0 if parts else 0)


def last_number(text: str) -> Fraction | None:
    r"""The last number written in the text, in any form of `parse_rational` and with its sign; None when there is none.

    `100 200 300` are three numbers: each group could be a number, so that spaces alone do not tell whether they group.
    """
    text, match = tidy(text), None
    for match in _NUMBER.finditer(text):
        pass
    if match is None:
        return None
    listed = _LISTED.match(match.group())
    start = match.start() + (listed.end() if listed else 0)
    found = text[start:match.end()]
    if len(found) > MAX_CHARACTERS:
        return None
    value, mixed = _unsigned(found), _INSIDE_MIXED.fullmatch(found)
    if value is None and mixed:
        value = _unsigned(f"{mixed['top']}/{mixed['bottom']}")
    return -value if value is not None and _NEGATIVE.search(text[max(start - 20, 0):start]) else value

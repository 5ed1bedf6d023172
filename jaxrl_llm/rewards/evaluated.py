r"""Whether an answer in LaTeX is a number that has been worked out, or still the question.

A checker that evaluates takes `123+456` for 579. Here a number is a sign and one numeral, and may have a percent sign, a
degree or a unit behind it and a name with an equals sign before it. Numerals: integers, decimals (0.1\overline{6} too),
`1,000`, `a/b`, `\frac{a}{b}`, `1\frac{1}{2}`, `2 \cdot 10^{3}`. Closed forms such as `2\sqrt{2}` are not numbers of this
kind; operations left in them are recognised by their signs. Nothing is evaluated, and texts are short, so time is bounded.
"""
import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.rational import MAX_CHARACTERS, NUMERAL, parse_rational, tidy
from jaxrl_llm.rewards.spelling import split, unwrapped
from jaxrl_llm.rewards.surroundings import FORMULA, SHORT_UNITS

_NUMBER = re.compile(rf"[-+]?\s*(?:\d*\.\d*\\(?:overline|bar)\{{\d{{1,20}}\}}|{NUMERAL})(?:_\{{?(?:10|\\text\{{ten\}})\}}?)?")
_REPEATING = re.compile(r"(?P<whole>\d*)\.(?P<head>\d*)\\(?:overline|bar)\{(?P<cycle>\d+)\}")
_LAYOUT = re.compile(r"\\(?:displaystyle|textstyle|q?quad)(?![a-z])|\\[ ()\[\]\\]|~")
_FONT = re.compile(r"\\(?:text(?:bf|it|rm)|math(?:bf|rm|it)|boldsymbol|bm|underline|fbox)(?![a-z])")
_POWER = r"(?:\^\{?-?[1-4]\}?|\^\{(?:\\circ)\})"
_WORD = rf"(?:\\text\{{(?:[^{{}}0-9%^]|{_POWER})*\}}|(?:{SHORT_UNITS})(?![A-Za-z])|(?<=\s)[A-Za-z]{{3,}})"
_UNIT = rf"{_WORD}(?:{_POWER})?"
_SUFFIX = re.compile(r"|".join((
    r"(?P<percent>\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|(?<=\s)percent))",
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0|\\degree)\s*(?:[CF]|\\text\{\s*[CF]\s*\})?",
    r"\s*\^\s*\{\s*(?:\\text)?\s*\{?(?:st|nd|rd|th)\}?\s*\}",
    rf"\s*{_UNIT}(?:(?:\s*/\s*|\s*\\cdot\s*|\s+|(?=\\text)){_UNIT})*",
    "")))
_END = r"(?=\W*$)"
_PARTS = "third|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|hundredth|thousandth|millionth"
_DIGITS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_ALTERNATIVES = re.compile(r"\b(?:or|and)\b", re.IGNORECASE)
# Words that doubt an answer, offer another one, or change its value: no units. A fraction such as "tenth" may be an ordinal
# before a noun (5 fifth graders), and a numeral may be a part of a word (5 two-digit numbers).
_OTHER_MEANING = re.compile(
    r"(?<!\\)\b(?:not|nor|neither|either|but|maybe|perhaps|possibly|probably|unless|except|versus|vs|else|instead|alternatively|"
    r"otherwise|approximately|approx|roughly|\w+n't|odd|even|plus|minus|over|out|below\s+zero|divided|squared|cubed|factorial|mod|"
    r"choose|base|pi|basis|mn|bn|mio|mln|mrd|half|halves|tens|(?:dozen|hundred|thousand|million|billion|trillion|lakh|crore)s?|"
    rf"(?:{_PARTS})s|(?:{_PARTS}|{_DIGITS}){_END})\b|\?", re.IGNORECASE)
_CHOICE, _TEXT = re.compile("[A-J]"), re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")
_WORDS = re.compile(r"(?!(?:[Tt]he )?(?:[Ff]inal )?(?:[Aa]nswer|[Rr]esult|[Ss]olution)$)(?=.*[AEIOUaeiou])"
                    r"(?=[Nn]o$|.*[A-Za-z][a-z]{2})[A-Za-z][a-z]*(?:[ -][A-Za-z][a-z]*)*")
_DENIAL = re.compile(r"\b(?:false|wrong|incorrect|mistaken)(?:ly)?\b|\\text\{\s*(?:is|are)\s+[^{}]+\}$", re.IGNORECASE)
_DOUBT = re.compile(r"\b(?:or|if|impossible|cannot|never|no)\b", re.IGNORECASE)
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
_NO_NAME = re.compile(r"[<>!]$|\\(?:not|neq?|leq?|geq?|in|pm|mp|lor|land|vee|wedge|quad|approx|to|sim|simeq|iff|implies|cup|"
                      r"equiv|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight|[Ll]eftright)arrow)(?![a-z])")


class EvaluatedNumber(NamedTuple):
    """`number`, of percent where a percent sign follows."""

    number: Fraction
    percent: bool


def read(text: str) -> EvaluatedNumber | None:
    """The text as one number that has been worked out, or None. Parentheses around a comma are those of a pair."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = _FONT.sub(r"\\text", _LAYOUT.sub(" ", tidy(text)))
    text = text.strip().strip("\u20ac\u00a3\u00a5").strip()
    while (inner := unwrapped(text)) is not None:
        if text.endswith(")") and "," in inner:
            return None
        text = inner.strip()
    match = _NUMBER.match(text)
    suffix = match and _SUFFIX.fullmatch(text, match.end())
    if not suffix or _changes(suffix.group()) or suffix.group().startswith(("K", r"\text{k}")):  # thousands
        return None
    number = _number(match.group().partition("_")[0])
    return None if number is None else EvaluatedNumber(number, bool(suffix["percent"]))


def same(left: EvaluatedNumber, right: EvaluatedNumber) -> bool:
    """Equal numbers; 50% is 0.5, and it is 50 where percent are asked for."""
    if left.percent == right.percent:
        return left.number == right.number
    percent, plain = (left, right) if left.percent else (right, left)
    return plain.number in (percent.number, percent.number / 100)


def number_verdict(answer: str, given: str) -> bool | None:
    """Whether `given` states the number `answer`, as `5`, `x = 5` or `2+3 = 5`; None when the answer is not a number."""
    reference = read(answer)
    if reference is None:
        return None
    *before, last = split(given, "=")
    if len(before) == 1 and read(last) is None:  # 5 = x
        before, last = [last], before[0]
    value = read(last)
    if value is None or not same(reference, value):
        return False
    return all(same(reference, side) if (side := read(text)) else is_name(text) for text in before)


def _changes(words: str) -> bool:
    """Whether words beside a number deny it, offer another one, or change its value."""
    return bool(_OTHER_MEANING.search(words) or _ALTERNATIVES.search(words))


def other_words(answer: str, given: str) -> bool:
    """Whether `given` and the reference differ in words that doubt, deny or change an answer, or in the base of digits."""
    words, denials, bases = ([set(pattern.findall(text.lower())) for text in (answer, given)]
                             for pattern in (_OTHER_MEANING, _DENIAL, _BASE))
    return words[0] != words[1] or denials[0] != denials[1] or (all(bases) and bases[0] != bases[1])


def other_label(answer: str, given: str) -> bool:
    """Whether `given` equates the answer, a choice's capital letter or words, with another such: `B = C`, `London = Paris`."""
    answer, *sides = (_TEXT.sub(r"\1", side).strip() for side in (answer, *re.split(r"=|\\equiv(?![a-z])", given)))
    label = next((kind for kind in (_CHOICE, _WORDS) if kind.fullmatch(answer)), None)
    if label is None or len(sides) == 1:
        return False
    return any(label.fullmatch(side) and side.lower() != answer.lower() for side in sides)


def doubted(text: str) -> bool:
    """Whether words of a sentence deny what it states, or offer another answer."""
    words = FORMULA.sub("", text)
    return any(pattern.search(words) for pattern in (_OTHER_MEANING, _DENIAL, _DOUBT))


def work_left(answer: str, given: str) -> bool:
    """Whether `given` has an operation that neither the reference nor a closed form of it would have.

    For a constant that includes a comma, as in a list, unless it groups thousands or the answer stands for two numbers.
    """
    constant, given = _is_constant(answer), ungrouped(answer, given)
    if constant and "," in given and "," not in answer and not _TWO_SIGNS.search(answer):
        return True
    return any(sign.search(given) and not sign.search(answer) for sign in _CALCULUS + (_NUMERIC if constant else ()))


def ungrouped(answer: str, given: str) -> str:
    r"""`given` without the commas that group thousands, as in `1,000\pi`, unless the reference `answer` has commas itself."""
    return given if "," in answer else _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), given)


def _command(*names: str) -> re.Pattern:
    return re.compile(rf"\\(?:{'|'.join(names)})(?![a-zA-Z])")


_CALCULUS = (_command("i*int", "oint"), _command("sum"), _command("prod"), _command("lim", "limsup", "liminf"),
             re.compile(r"\\frac\s*\{\s*(?:d|\\partial)\b"))
_TWO_SIGNS = _command("pm")
_THOUSANDS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d|,|\{,)")
_NUMERAL = r"\d+(?:\.\d+)?"
_NUMERIC = (  # of constants only: of expressions in variables these may be the closed form
    _command("[dt]?binom", "choose"), re.compile("!"), _command("[lr]floor", "[lr]ceil"), _command("gcd", "lcm", "max", "min"),
    _command("[bp]?mod"), _command("det"), re.compile(r"\\begin\{[vV]matrix"),
    _command("[lcd]?dots"),
    re.compile(rf"(?<![\w.^_}}]){_NUMERAL}\s*[-+\u2212]\s*{_NUMERAL}(?![\d.])(?!\s*(?:\\(?!cdot|times|div)|[A-Za-z^(]))"),
    re.compile(rf"(?<![\w.]){_NUMERAL}\s*(?:\\cdot|\\times|\\div|\*|\u00d7|\u00f7)\s*(?!10\s*\^){_NUMERAL}"),
    re.compile(rf"\(\s*{_NUMERAL}\s*\)\s*\(\s*{_NUMERAL}\s*\)"),
)


def _is_constant(text: str) -> bool:
    """Whether the text has no variable: its only letters are in commands, or e and i."""
    return "\\text" not in text and not re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", text))


def _number(text: str) -> Fraction | None:
    """The numeral as an exact number."""
    if (number := parse_rational(text)) is not None:
        return number
    sign = -1 if text[0] == "-" else 1
    text = text.lstrip("-+ ")
    if repeating := _REPEATING.fullmatch(text):
        head, cycle = repeating["head"], repeating["cycle"]
        digits = Fraction(int((repeating["whole"] or "0") + head))
        return sign * (digits + Fraction(int(cycle), 10 ** len(cycle) - 1)) / 10 ** len(head)
    return None


def is_name(text: str) -> bool:
    """Whether the text may precede an equals sign: a name or an expression, but no list, choice, denial or inequality."""
    return len(split(text, ",;")) == 1 and not _changes(text) and not _NO_NAME.search(text.rstrip(" "))

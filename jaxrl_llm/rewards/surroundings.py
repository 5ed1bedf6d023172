r"""What may surround an answer in a box: a sentence, `\text{Answer: }`, the name of a variable, a unit."""
import re
from collections.abc import Iterator

SHORT_UNITS = ("nm|mm|cm|dm|km|m|in|ft|yd|mi|mg|g|kg|lbs?|oz|ms|s|sec|min|h|hr|hrs|mL|ml|cL|L|l|N|J|kJ|W|kW|V|A|Hz|Pa|K|mph|"
               "kph|kmh|rpm|deg|rad|USD|EUR|cc|cents?")
FORMULA = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LEAD = re.compile(r"^[^\d=$\\]*\b(?:is|are|that|have|get|obtain|find|equals?|answer|solution|therefore|thus|hence|so)[\s:,]*$",
                   re.IGNORECASE)
_FINAL, _SENTENCE_END = re.compile(r"\bfinal answer is[\s:]*$", re.IGNORECASE), re.compile(r"\s*(?:[.!][^\d$\\]*)?")
_INTRODUCED = re.compile(r"^(?:(?:\\text\{\s*)?(?:the )?(?:final )?answer(?: is)?\s*:?\s*\}?\s*)?", re.IGNORECASE)
_NAMED = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z, ]+\))?\s*=\s*")
_PLAIN_UNIT = re.compile(rf"\s*\\text\{{\s*(?:units?|{SHORT_UNITS})\s*\}}$")


def stated(text: str) -> str:
    r"""The formula that a sentence ends in (`We find that $x \neq 3$.`), of several the one that is the `final answer`.

    The text itself where there is no such formula, or where the sentence has numerals or words behind it.
    """
    *others, last = list(FORMULA.finditer(text)) or [None]
    if last is None:
        return text
    before, after = text[:last.start()], text[last.end():]
    whole = (_FINAL if others else _LEAD).search(before) and _SENTENCE_END.fullmatch(after)
    return next(filter(None, last.groups())) if whole else text


def bare(text: str) -> Iterator[str]:
    r"""The text without a unit behind it, then without what introduces it: `\text{Answer: }`, variables (`x =`, `f(x) =`)."""
    text = _PLAIN_UNIT.sub("", text)
    yield text
    text = _INTRODUCED.sub("", text)
    yield text
    while (rest := _NAMED.sub("", text)) != text:
        yield rest
        text = rest

r"""Symbolic equality by math-verify. Imported by worker processes only, at their start, outside any deadline.

math-verify counts constants as equal whose difference is below 1e-15, takes the last side of a chain of equations, evaluates
what is left to do, and falls back to some number of a text that it cannot read. What it accepts is therefore checked again.
"""
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from jaxrl_llm.rewards.evaluated import is_name, number_verdict, work_left
from jaxrl_llm.rewards.operations import operations
from jaxrl_llm.rewards.spelling import compact, split

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off: the pool has one
_ASIDE = re.compile(  # words with their powers; fractions, which are reduced; inverse functions; bases of numerals
    r"\\(?:text|math)[a-z]*\{[^{}]*\}(?:\^\{?-?\d\}?)?|\\frac(?: ?\d|\{\d+\}){2}|\d+ ?/ ?\d+|\^\{-1\}|(?<=\d)_\{?\d+\}?")
_EVALUATED = re.compile(r"\\(?:overline|bar|[dt]?binom|choose)(?![a-z])|\d{12}")  # numerals become others

_BOTH, _WORDS = r"\pm", re.compile(r"\\(?:text|mathrm)|(?<![\\A-Za-z])[A-Za-z]{3}")
_DIGITS, _TOLERANCE = 60, sympy.Float("1e-50", 60)
_ROUNDED = sympy.Float("1e-4")  # of decimals, which math-verify compares to six places


def symbolic_equal(answer: str, given: str, strict: bool = True) -> bool:
    """Whether math-verify judges `given` equal to the reference `answer`; texts that it cannot read equal themselves alone.

    `strict`: the sides of a chain are equal, and constants are worked out, see `jaxrl_llm.rewards.operations`.
    """
    given, *decimals = re.split(r"\\approx(?![A-Za-z])", given) if strict and r"\approx" not in answer else [given]
    references, readings = _read(answer, strict), _read(given, strict)
    if any(_same(left, right, decimals, strict) for left in references for right in readings):
        return True
    parts = [split(text, ",;") for text in (answer, given)]
    unread = not any(isinstance(one, sympy.Basic) for one in references)
    return strict and unread and not decimals and 1 < len(parts[0]) == len(parts[1]) and all(map(_same_part, *parts))


def _same_part(answer: str, given: str) -> bool:
    r"""Whether two parts of lists are equal, words as text: `x = 2k\pi, k \in \mathbb{Z}`."""
    answer, given = answer.strip(), given.strip()
    if compact(answer) == compact(given) or _WORDS.search(answer + given):
        return compact(answer) == compact(given)
    verdict = number_verdict(answer, given)
    return not work_left(answer, given) and symbolic_equal(answer, given) if verdict is None else verdict


def _read(text: str, strict: bool) -> list:
    r"""What math-verify reads in a box; `strict`: nothing where it leaves numerals out, as behind words that it cannot read.

    The box may hold words around a formula in dollars, which is then read, too. Where it reads nothing else, the two values
    of `\pm` are written out.
    """
    kinds, found = [LatexExtractionConfig(), *([] if strict else [ExprExtractionConfig()])], []
    # Its timer uses signals, which work in main threads only and cannot stop every computation, so it is turned off.
    for part in [rf"\boxed{{{text}}}", *([text] if "$" in text else [])]:
        read = parse(part, kinds, parsing_timeout=None, raise_on_error=True)
        found += read if not strict or all(isinstance(one, str) or _is_whole(text, one) for one in read) else []
    if strict and (both := _both_values(text)) != text and not any(isinstance(one, sympy.Basic) for one in found):
        found += _read(both, strict)
    return found


def _both_values(text: str) -> str:
    r"""A list whose members with one `\pm` are two members each: `3, \pm 2` is `3, + 2, - 2`."""
    parts = ([part.replace(_BOTH, sign) for sign in "+-"] if part.count(_BOTH) == 1 else [part] for part in split(text, ","))
    return ",".join(itertools.chain(*parts))


def _is_whole(text: str, read) -> bool:
    """Whether what was read has the digits of the text, those of units and of a name before an equals sign aside."""
    name, *values = split(text, "=")
    text = _ASIDE.sub("", "=".join(values) if values and is_name(name) else text)
    said, kept = (Counter(re.findall("[1-9]", part)) for part in (text, str(read)))
    if read.has(sympy.FiniteSet):  # members that are equal are counted once
        said = Counter(set(said))
    return bool(_EVALUATED.search(text) or _EVALUATED.search(str(read))) or not said - kept


def _same(reference, found, decimals: list[str], strict: bool) -> bool:
    """Whether one reading of the box equals one of the reference; `decimals` follow it behind signs of approximation."""
    if not verify(reference, found, timeout_seconds=None, raise_on_error=True):
        return False
    if isinstance(reference, str) or isinstance(found, str):
        return not decimals
    sides = list(_sides(found))
    if strict and not (_chained(reference, sides) and all(_rounds(sides[-1], text) for text in decimals)):
        return False
    return _agree(reference, found) and not (
        strict and _is_constant(sides[-1]) and operations(sides[-1]) - operations(reference))


def _sides(found) -> Iterator:
    """The sides of a chain of equations; what is no equation is one side."""
    if isinstance(found, sympy.And) and all(isinstance(one, sympy.Eq) for one in found.args):
        equations = found._unsorted_args
        yield from (one.lhs for one in equations)
        yield equations[-1].rhs
    elif isinstance(found, sympy.Eq):
        yield from (found.lhs, found.rhs)
    else:
        yield found


def _letters(found) -> set[str]:
    return {letter.name for letter in found.free_symbols} - {"i"}


def _is_constant(found) -> bool:
    return not _letters(found)


def _chained(reference, sides: list) -> bool:
    """Whether all sides before the last are its equals, names, or expressions in letters that the reference lacks."""
    if isinstance(reference, (sympy.Eq, sympy.And)):
        sides = sides[1:]
    known = _letters(reference)
    for place, side in enumerate(sides[:-1]):
        if isinstance(side, sympy.Symbol):
            if place and known and side.name not in known:
                return False
        elif "," in _letters(side) or _letters(side) <= known and not _agree(side, sides[-1]):
            return False
    return True


def _rounds(side, text: str) -> bool:
    """Whether the text is the value of `side`, rounded or cut off to some decimals."""
    match = re.fullmatch(r"\s*(-?\d+\.(\d+))(?:\s*\\[cl]?dots)?\s*", text)
    if match is None:
        return False
    value, decimal, unit = abs(sympy.N(side)), abs(sympy.Float(match[1])), sympy.Float(10) ** -len(match[2])
    return bool(sympy.N(side) * sympy.Float(match[1]) >= 0 and -unit / 2 <= value - decimal < unit)


def _agree(left, right) -> bool:
    """False where two values, or two members of intervals, tuples, sets and matrices, are numbers that differ."""
    first, second = list(_sides(left)), list(_sides(right))
    if len(first) > 1 and len(second) > 1 and first[0] != second[0]:
        return True  # equations in other forms
    left, right = first[-1], second[-1]
    members = [_members(side) for side in (left, right)]
    if None not in members:
        first, second = members
        if isinstance(left, sympy.FiniteSet) or isinstance(right, sympy.FiniteSet) or isinstance(left, sympy.Union):
            return all(any(_agree(one, other) for other in group)
                       for one, group in [*zip(first, itertools.repeat(second)), *zip(second, itertools.repeat(first))])
        return len(first) == len(second) and all(map(_agree, first, second))
    if not all(isinstance(side, sympy.Expr) for side in (left, right)) or sympy.Symbol in map(type, (left, right)):
        return True
    return _equal(left, right)


def _members(found) -> list | None:
    if isinstance(found, sympy.Interval):
        return [found.start, found.end]
    if isinstance(found, sympy.MatrixBase):
        return list(found.flat())
    return list(found.args) if isinstance(found, (sympy.FiniteSet, sympy.Tuple, sympy.Union)) else None


def _equal(left, right) -> bool:
    """Whether two expressions are equal at one place, to 50 digits, or to 4 where decimals are written."""
    decimal, percent = left.has(sympy.Float) or right.has(sympy.Float), left.has(sympy.UnevaluatedExpr)
    percent = percent != right.has(sympy.UnevaluatedExpr)
    left, right = _value(left), _value(right)
    if left.is_Rational and right.is_Rational and not decimal:
        return left == right or (percent and left in (100 * right, right / 100))
    left, right = sympy.N(left, _DIGITS), sympy.N(right, _DIGITS)
    if left.is_infinite or right.is_infinite:
        return left == right
    if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
        return True
    scales = (1, 100, sympy.Rational(1, 100)) if percent else (1,)
    return any(abs(left - scale * right) <= (_ROUNDED if decimal else _TOLERANCE) * max(abs(left), abs(scale * right))
               for scale in scales)


def _value(expression):
    """The expression where each letter has a value that depends on its name; `i` is the imaginary unit."""
    places = {letter: sympy.I if letter.name == "i" else 1 + sympy.Rational(sum(map(ord, letter.name)) % 97 + 1, 101)
              for letter in expression.free_symbols}
    return expression.subs(places).doit()


symbolic_equal("x+1", "1+x")  # loads everything that the first call needs

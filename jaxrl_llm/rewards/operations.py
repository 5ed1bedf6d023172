r"""Which operations between numerals and constants a constant still has to do, read from math-verify's unevaluated trees.

`\pi + \pi` adds like terms, `2\pi \cdot 5` multiplies numerals; `\frac{1}{2} + \frac{\sqrt{5}}{2}`, `\frac{4}{\sqrt{2}}` and
`3\ln 2` are closed forms.
"""
from collections.abc import Iterator

import sympy
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction


def operations(found) -> set[str]:
    """The kinds of operations that are left in an expression, or in any member of an interval, tuple, set or matrix."""
    if isinstance(found, sympy.MatrixBase):
        return set().union(*map(operations, found.flat()))
    if not isinstance(found, sympy.Basic):
        return set()
    kinds = set(_of(found))
    return kinds.union(*map(operations, found.args))


def _of(node) -> Iterator[str]:
    if isinstance(node, sympy.Add):
        rests = [rest for term in _terms(node)
                 for rest in {part.as_coeff_Mul()[1] for part in sympy.Add.make_args(_worked_out(term))}]
        if len(set(rests)) < len(rests):
            yield "like terms are added"
    elif isinstance(node, sympy.Mul):
        above, below = _factors(node)
        if any(sum(map(_is_numeral, side)) > 1 for side in (above, below)):
            yield "numerals are multiplied"
        if sum(map(_is_root, above)) > 1:
            yield "roots are multiplied"
        if sum(isinstance(factor, sympy.Add) for factor in above) > 1:
            yield "sums are multiplied"
        if any(above.count(factor) > 1 for factor in (sympy.pi, sympy.E)) or sum(isinstance(f, sympy.exp) for f in above) > 1:
            yield "constants are multiplied"
    elif isinstance(node, sympy.Pow):
        if node.exp.is_Integer and abs(node.exp) > 1 and (isinstance(node.base, sympy.Add) or _is_root(node.base) or (
                _is_numeral(node.base) and node.base != 10)):
            yield "a power is taken"
        elif _is_root(node) and node.doit().is_Rational:
            yield "a root is a number"
    elif isinstance(node, (TrigonometricFunction, InverseTrigonometricFunction)):
        yield "a trigonometric function is taken"
    elif isinstance(node, sympy.log):
        yield "a logarithm is taken"


def _worked_out(term):
    """The term simplified; a root of a decimal stays a root."""
    value = term.doit().expand()
    return term if value.is_Float and not term.is_Float else value


def _terms(node) -> Iterator:
    """The terms of a sum and of the sums in brackets that it adds or subtracts."""
    for term in node.args:
        inner = [factor for factor in term.args if factor != -1] if isinstance(term, sympy.Mul) else [term]
        if len(inner) == 1 and isinstance(inner[0], sympy.Add):
            yield from _terms(inner[0])
        else:
            yield term


def _factors(node) -> tuple[list, list]:
    """The factors of a product above and below the line, those of products within it too."""
    above, below = [], []
    for factor in node.args:
        if isinstance(factor, sympy.Mul):
            inner = _factors(factor)
            above += inner[0]
            below += inner[1]
        elif isinstance(factor, sympy.Pow) and factor.exp == -1:
            inner = _factors(factor.base) if isinstance(factor.base, sympy.Mul) else ([factor.base], [])
            above += inner[1]
            below += inner[0]
        elif isinstance(factor, sympy.Rational) and not factor.is_Integer:
            above.append(sympy.Integer(factor.p))
            below.append(sympy.Integer(factor.q))
        else:
            above.append(factor)
    return above, below


def _is_numeral(node) -> bool:
    return isinstance(node, (sympy.Rational, sympy.Float)) and abs(node) != 1


def _is_root(node) -> bool:
    return isinstance(node, sympy.Pow) and node.exp.is_Rational and not node.exp.is_Integer and node.base.is_number

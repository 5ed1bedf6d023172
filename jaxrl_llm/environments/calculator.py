"""The tool `calculator`: exact arithmetic on a parsed expression. Nothing is evaluated as Python."""
import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from jaxrl_llm.environments.tools import Tool, ToolError, of_function

LENGTH_LIMIT = 500  # characters
BITS_LIMIT = 10_000  # bits of a numerator or a denominator: 3000 digits
_OPERATORS: dict[type, Callable] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
                                    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_SIGNS: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator() -> Tool:
    """`calculator(expression)`."""
    return of_function(_calculator)


def _calculator(expression: str) -> str:
    """Works out an arithmetic expression exactly: numbers, + - * / // % ** and parentheses.

    Args:
        expression: for instance (3 + 4) * 2.5
    """
    return written(value(expression))


_calculator.__name__ = "calculator"


def value(expression: str) -> Fraction:
    """The exact value. Raises ToolError for text that is no arithmetic expression, division by zero and too large numbers."""
    text = expression.strip().replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
    if len(text) > LENGTH_LIMIT:
        raise ToolError(f"the expression has {len(text)} characters; allowed are {LENGTH_LIMIT}")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression[:100]!r} is no arithmetic expression; write for instance (3 + 4) * 2.5") from None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(Fraction(node.value))
    if isinstance(node, ast.Constant) and type(node.value) is float:
        return _decimal(ast.get_source_segment(text, node) or "", node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(Fraction(_OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left, text), _value(node.right, text))
    raise ToolError(f"{ast.unparse(node)[:50]!r} is not allowed; numbers, + - * / // % ** and parentheses are")


def _decimal(written_as: str, rounded: float) -> Fraction:
    """The value of the digits, 0.1 being a tenth; Python's float of them bounds the exponent."""
    if rounded in (0.0, float("inf")) and "e" in written_as.lower():
        raise ToolError(f"the number {written_as[:50]} is too large or too small")
    return _bounded(Fraction(written_as))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """The power, whose size is checked before it is computed."""
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {written(exponent)} is not an integer; allowed are integers")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * (bits - 1) > BITS_LIMIT:
        raise ToolError("the number is too large; allowed are 3000 digits")
    return _bounded(base ** int(exponent))


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > BITS_LIMIT:
        raise ToolError("the number is too large; allowed are 3000 digits")
    return number


def written(number: Fraction) -> str:
    """An integer, a terminating decimal, or else twelve significant digits and the fraction."""
    if number.denominator == 1:
        return str(number.numerator)
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    approximate = f"{float(number):.12g}" if abs(number) < 10 ** 300 else "?"
    if rest == 1 and Fraction(approximate if approximate != "?" else 0) == number:
        return approximate
    return f"{approximate} ({number.numerator}/{number.denominator})"

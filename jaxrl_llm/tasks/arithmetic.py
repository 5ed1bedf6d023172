"""Generated integer arithmetic in levels, split into train and held-out by a hash of the problem itself."""
import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, split_position, task
from jaxrl_llm.tools.registry import one_of

CHAT_TEMPLATE = "What is {expression}? Answer with just the number."
ENUMERATE_UP_TO = 20_000  # larger spaces are sampled


@dataclasses.dataclass(frozen=True)
class Level:
    """All expressions `a op b op c ...`: operands in `[low, high]`, digits in `[low_digit, top_digit]`, operators by choice."""

    operators: tuple[str, ...]
    low: int
    high: int
    top_digit: int = 9
    low_digit: int = 0

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(n for n in range(self.low, self.high + 1)
                     if self.low_digit <= int(min(str(n))) and int(max(str(n))) <= self.top_digit)

    @property
    def radices(self) -> tuple[int, ...]:
        return (len(self.numbers),) * (len(self.operators) + 1) + tuple(len(choices) for choices in self.operators)

    @property
    def size(self) -> int:
        return math.prod(self.radices)


LEVELS = {
    "digit": Level(("+",), 0, 9),
    "nocarry2": Level(("+",), 10, 44, top_digit=4),
    "nocarry3": Level(("+",), 100, 444, top_digit=4),  # every digit of the answer is the sum of two digits
    "nozero3": Level(("+",), 111, 444, top_digit=4, low_digit=1),  # the same, and no sum of two digits is rarer than 1 in 16
    "add2": Level(("+",), 10, 99),
    "add3": Level(("+",), 100, 999),
    "sub2": Level(("-",), 10, 99),
    "mul": Level(("*",), 0, 12),
    "mul2": Level(("*",), 10, 99),
    "sum3": Level(("+", "+"), 0, 99),
    "sum4": Level(("+", "+", "+"), 0, 99),
    "chain3": Level(("+-*", "+-*"), 0, 9),
}
MIXED = ("digit", "add2", "sub2", "mul", "sum3", "chain3")


@dataclasses.dataclass(frozen=True)
class Expression:
    level: str
    operands: tuple[int, ...]
    operators: tuple[str, ...]

    def text(self, space: str = "") -> str:
        rest = (f"{space}{op}{space}{b}" for op, b in zip(self.operators, self.operands[1:]))
        return str(self.operands[0]) + "".join(rest)

    def value(self) -> int:
        """The exact value; products bind tighter than sums."""
        terms = [self.operands[0]]
        for op, operand in zip(self.operators, self.operands[1:]):
            if op == "*":
                terms[-1] *= operand
            else:
                terms.append(operand if op == "+" else -operand)
        return sum(terms)

    def twin(self) -> str:
        """One text for all orders of a pure sum or product, so that 3+5 and 5+3 fall on the same side of the split."""
        if set(self.operators) in ({"+"}, {"*"}):
            return self.operators[0].join(map(str, sorted(self.operands)))
        return self.text()


def expression(level: str, index: int) -> Expression:
    """Number `index` of the level's space, by mixed-radix decoding."""
    spec = LEVELS[level]
    digits = [int(digit) for digit in np.unravel_index(index, spec.radices)]
    count = len(spec.operators) + 1
    operators = tuple(choices[digit] for choices, digit in zip(spec.operators, digits[count:]))
    return Expression(level, tuple(spec.numbers[digit] for digit in digits[:count]), operators)


def _members(level: str, size: int | None, seed: int) -> list[Expression]:
    space = LEVELS[level].size
    wanted = min(space, ENUMERATE_UP_TO) if size is None else size
    if not 0 < wanted <= space:
        raise ValueError(f"size={size} problems asked of level {level!r}, which has {space}; give 1 to {space}")
    indices: Sequence[int] | np.ndarray = range(space)
    if wanted < space:  # distinct without building the whole space
        indices = np.random.default_rng(seed).choice(space, wanted, replace=False, shuffle=False)
    return [expression(level, int(index)) for index in indices]


@task
def arithmetic(*, level: str = "digit", chat: bool = False, heldout_fraction: float = 0.2,
               size: int | None = None, seed: int = 0) -> Task:
    """Integer arithmetic as `"7+5="` (byte policies) or, with `chat`, "What is 7 + 5? Answer with just the number."

    `level` is one of `LEVELS`, several joined by "+" (`Problem.level` says which), or `"mixed"`, six of them. `size` is the
    number of problems per level before the split: by default the whole space, or 20,000 drawn with `seed` where it is
    larger; of several levels the smaller ones stay whole. Raises ValueError for an unknown level, a size beyond the space,
    or a fraction that leaves a side empty.
    """
    names = MIXED if level == "mixed" else tuple(level.split("+"))
    for name in names:
        one_of("arithmetic level", name, (*LEVELS, "mixed") if len(names) == 1 else LEVELS)
    members: dict[str, Expression] = {}
    for name in names:
        wanted = min(size, LEVELS[name].size) if size is not None and len(names) > 1 else size
        for member in _members(name, wanted, seed):
            members.setdefault(member.text(), member)  # an expression of two levels belongs to the first
    sides: tuple[list, list] = ([], [])
    for member in members.values():
        sides[split_position(member.twin()) < heldout_fraction].append(member)

    def build(member: Expression, number: int) -> Problem:
        chat_turn = {"role": "user", "content": CHAT_TEMPLATE.format(expression=member.text(" "))}
        return Problem((chat_turn,) if chat else member.text() + "=", str(member.value()), number, member.level)

    return disjoint_task(f"arithmetic/{level}", *sides, build, reward="last_number" if chat else "exact")

"""The text of a compiled program: its computations and instructions, sizes of arrays, and how often loops run."""
import dataclasses
import math
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = shape opcode(rest`, operands and attributes."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def source(self) -> str:
        """The operation of the traced program that it came from."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """Names of its operands, in order."""
        depth, end = 1, len(self.rest)
        for i, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                end = i
                break
        return re.findall(r"%([\w.\-]+)", self.rest[:end])

    def named(self, *attributes: str) -> list[str]:
        """Computations that it calls through one of these attributes."""
        lists = re.findall(rf"(?<![\w-])(?:{'|'.join(attributes)})=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.rest)
        return [name.strip().lstrip("%") for groups in lists for name in (groups[0] or groups[1]).split(",")]


_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation of a program, and the name of its entry computation.

    Raises ValueError for a text that is not a compiled program.
    """
    bodies, entry, body = {}, "", []
    for line in _whole_lines(text):
        if instruction := _INSTRUCTION.match(line):
            body.append(Instruction(*instruction.groups()))
        elif opened := _COMPUTATION.match(line):
            body = bodies[opened[2]] = []
            entry = opened[2] if opened[1] else entry
    if not entry:
        raise ValueError("the text has no ENTRY computation; give compiled.as_text() of a jitted function's lower().compile()")
    return bodies, entry


def _whole_lines(text: str) -> list[str]:
    """Lines, with the JSON of a kernel's attributes joined to its instruction: the compiler breaks lines there."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside and line and line != "}" and not line[0].isspace():
            lines[-1] += line
        else:
            lines.append(line)
            inside = (inside or line.endswith("{")) and line != "}"
    return lines


def dimensions(shape: str) -> tuple[int, ...]:
    """Dimensions of the first array in a shape."""
    return _numbers(_ARRAY.search(shape)[2])


def size(shape: str, *, main_memory: bool = False) -> float:
    """Bytes of an array or tuple as it is written: `f32[2,3]{1,0}`, `(bf16[8], u32[])`.

    With `main_memory` only arrays in main memory count, not those in a core's own memory, which have `S(n)` in their layout.
    """
    def one(dtype, sizes):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or "0")[0])
        return bits / 8 * math.prod(_numbers(sizes))

    return sum(one(dtype, sizes) for dtype, sizes, layout in _ARRAY.findall(shape)
               if not main_memory or not re.search(r"S\([1-9]", layout))


def trips(loop: Instruction, computations: Mapping[str, list[Instruction]]) -> int | None:
    """How often the body of a `while` runs: as annotated by the compiler, or the constant bound of a counter from 0."""
    if known := re.search(r'known_trip_count\D*"n":"(\d+)"', loop.rest):
        return int(known[1])
    condition = computations[loop.named("condition")[0]]
    constants = [re.match(r"-?\d+", i.rest) for i in condition if i.opcode == "constant"]
    compared = condition[-1].opcode == "compare" and "direction=LT" in condition[-1].rest
    return int(constants[0][0]) if compared and len(constants) == 1 and constants[0] else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace("<=", "").split(",") if n)

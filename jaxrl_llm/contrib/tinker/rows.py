"""Training examples of any lengths as packed rows of few shapes. All of this happens on the host, in numpy."""
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_SHORTEST = 32  # slots of a row


class Datum(NamedTuple):
    """A training example.

    tokens: i32[n], what the model reads.  targets: i32[n], the token after each of them whose log-prob is taken.
    fields: name -> f32[n], further inputs of a loss, see `losses`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    fields: Mapping[str, np.ndarray]


class PackedExamples(NamedTuple):
    """Examples packed one after the other in `[R, N]` slots; none sees another.

    tokens, positions, targets: i32; 0 on padding.  end: i32, the slot after the example, else 0, see `packing.PackedRows`.
    fields: name -> f32, 0 on padding.
    slots: i32[D, N], for each example the places of its tokens in the flat rows; R N on padding.
    """

    tokens: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    targets: np.ndarray
    fields: dict[str, np.ndarray]
    slots: np.ndarray


class ExamplePlace(NamedTuple):
    """The place of an example: the number of its row, counted through all micro-batches, and its first slot."""

    row: int
    start: int


def pack(data: Sequence[Datum], budget: int) -> tuple[list[PackedExamples], list[ExamplePlace]]:
    """Micro-batches of at most `budget` slots, or of one row if an example is longer, and the place of each example.

    Rows are as long as the longest example, rounded up to a power of two; examples go into the first row that has room, the
    longest first. The number of rows is rounded up to a power of two, so that few programs are compiled.
    """
    longest = max(len(one.tokens) for one in data)
    length = _SHORTEST
    while length < longest:
        length *= 2
    places, totals = [ExamplePlace(0, 0)] * len(data), []
    for i in sorted(range(len(data)), key=lambda i: -len(data[i].tokens)):
        count = len(data[i].tokens)
        row = next((row for row, used in enumerate(totals) if used + count <= length), len(totals))
        if row == len(totals):
            totals.append(0)
        places[i] = ExamplePlace(row, totals[row])
        totals[row] += count
    size = 1
    while size < len(totals) and 2 * size * length <= budget:
        size *= 2
    count = -(-len(totals) // size) * size
    whole = _filled(data, places, (count, length))
    def cut(first):
        part = slice(first, first + size)
        own = [(len(one.tokens), (place.row - first) * length + place.start)
               for one, place in zip(data, places, strict=True) if first <= place.row < first + size]
        return PackedExamples(*(x[part] for x in whole[:4]), {name: x[part] for name, x in whole.fields.items()},
                              _slots(own, size, length))
    return [cut(first) for first in range(0, count, size)], places


def _slots(examples: Sequence[tuple[int, int]], size: int, length: int) -> np.ndarray:
    """`PackedExamples.slots` of examples of these numbers of tokens at these places; D is a power of two."""
    slots = np.full((1 << max(len(examples) - 1, 0).bit_length(), length), size * length, np.int32)
    for row, (count, start) in zip(slots, examples):
        row[:count] = np.arange(start, start + count)
    return slots


def _filled(data: Sequence[Datum], places: Sequence[ExamplePlace], shape: tuple[int, int]) -> PackedExamples:
    whole = PackedExamples(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32),
                           np.zeros(shape, np.int32), {name: np.zeros(shape, np.float32) for name in data[0].fields},
                           np.zeros((0, 0), np.int32))
    for one, (row, start) in zip(data, places, strict=True):
        slots = slice(start, start + len(one.tokens))
        whole.tokens[row, slots], whole.targets[row, slots] = one.tokens, one.targets
        whole.positions[row, slots], whole.end[row, slots] = np.arange(len(one.tokens)), slots.stop
        for name, values in one.fields.items():
            whole.fields[name][row, slots] = values
    return whole


def unpack(values: Sequence[np.ndarray], data: Sequence[Datum], places: Sequence[ExamplePlace]) -> list[np.ndarray]:
    """`[n]` of each example, from `[R, N]` of each micro-batch."""
    rows = np.concatenate(values)
    return [rows[row, start:start + len(one.tokens)] for one, (row, start) in zip(data, places, strict=True)]

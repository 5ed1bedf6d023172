"""The lanes of a chunk: which rows it decodes, and what the device needs to know about them."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.engines.requests import Request, Row
from jaxrl_llm.engines.sampling import OFF, Sampling
from jaxrl_llm.engines.slots import Lanes

FEWEST = 8  # lanes of a chunk: a step of fewer rows takes as long as reading the weights

_PLACES = (1024, 768, 512, 384, 256, 192, 128, 96, 64)  # that lanes may share: few numbers, as each is a program of its own


class Common(NamedTuple):
    """What the caches of lanes share: runs of as many lanes each have their first `places` as in one of the slots `leaders`."""

    places: int
    leaders: tuple[int, ...]


def lane_counts(rows: int) -> tuple[int, ...]:
    """The numbers of rows that a chunk may have: all, half or a quarter of them, if these are at least `FEWEST`."""
    return tuple(n for n in dict.fromkeys((rows, -(-rows // 2), -(-rows // 4))) if n == rows or n >= FEWEST)


def decoding(slots: Sequence[Row | None]) -> list[Row | None]:
    """The row of each slot, None where none decodes; idle ones stay in their slots until other rows need these."""
    return [None if row is None or row.idle else row for row in slots]


def places_of(slots: Sequence[Row | None], count: int, shards: int = 1) -> list[int]:
    """The slots of `count` lanes of each shard: those whose rows decode, filled up with others, which are inert."""
    rows, places, size = decoding(slots), list[int](), len(slots) // shards
    for first in range(0, len(slots), size):
        idle = [slot for slot in range(first, first + size) if rows[slot] is None]
        running = [slot for slot in range(first, first + size) if rows[slot]]
        places += sorted(running + idle[:count - len(running)])
    return places


class Widths(NamedTuple):
    """What the arrays of lanes have room for, which compiled programs depend on.

    stops: stop tokens of a row.  restricted: whether rows may restrict the vocabulary.
    """

    stops: int = 4
    restricted: bool = False

    def hold(self, request: Request) -> bool:
        """Whether they hold a request."""
        return len(request.stop_tokens) <= self.stops and (self.restricted or not restricts(request.sampling))

    def widened(self, requests: Sequence[Request]) -> "Widths":
        """Widths that hold these requests: those of stops only grow, the others are as needed."""
        stops = max(self.stops, _power(max(len(request.stop_tokens) for request in requests)))
        return Widths(stops, any(restricts(request.sampling) for request in requests))


def _power(count: int) -> int:
    """The first power of two from 4 on that is no less."""
    return max(4, 1 << (count - 1).bit_length()) if count else 4


def lanes_of(rows: Sequence[Row | None], slots: Sequence[int], lengths: Sequence[int], widths: Widths) -> Lanes:
    """What the device needs to know about rows in these slots, with these numbers of filled places; None is an inert lane."""
    stops = np.full((len(rows), widths.stops), -1, np.int32)
    numbers = np.zeros((len(rows), 4), np.int64)
    for i, row in enumerate(rows):
        if row is not None:
            stops[i, :len(row.request.stop_tokens)] = row.request.stop_tokens
            numbers[i] = row.request.stream, row.tokens[-1], row.drawn, row.left
    uid, pending, drawn, left = numbers.T
    halves = np.stack([uid >> 32, uid & 0xFFFFFFFF], axis=1).astype(np.uint32)
    keyed = np.zeros(len(rows), bool)
    for i, row in enumerate(rows):
        if row is not None and row.request.key is not None:
            halves[i], keyed[i] = row.request.key, True
    slot, length, pending, drawn, left = (np.asarray(x, np.int32) for x in (slots, lengths, pending, drawn, left))
    alive = np.array([row is not None for row in rows])
    yields = np.array([row is not None and row.yields for row in rows])
    sampling = stacked([Sampling() if row is None else row.request.sampling for row in rows], widths.restricted)
    return Lanes(slot, halves, keyed, length, pending, drawn, left, alive, yields, stops, sampling)


def shapes_of(lanes: Lanes) -> tuple[bool, int]:
    """What a chunk's program depends on beside the number of lanes: see `Widths`."""
    return lanes.sampling.top_k is not None, lanes.stops.shape[1]


def common_places(owners: Sequence[Row | None], shards: int = 1) -> Common:
    """What lanes share: the runs of equal length that leave the fewest places to read; idle lanes go with any run.

    Runs lie within one of the `shards`.

    It is a quarter of the longest cache at least, as a chunk copies the places behind it.
    """
    best, most = Common(0, ()), 0
    alike, longest = _alike(owners), max((row.cached for row in owners if row), default=0)
    lanes = len(owners) // shards
    for length in (n for n in range(2, lanes + 1) if lanes % n == 0):
        runs = [[i for i in range(first, first + length) if owners[i]] for first in range(0, len(owners), length)]
        places = min(alike[run[0]][0] if len(run) == 1 else min(alike[i][1] for i in run[1:]) for run in runs if run)
        spared = places * (len(owners) - len(runs))
        if spared > most and 4 * places >= longest:
            best, most = Common(places, tuple(owners[run[0]].slot if run else 0 for run in runs)), spared
    return best


def _alike(owners: Sequence[Row | None]) -> list[tuple[int, int]]:
    """Of `_PLACES`, how many each running lane has, and how many of these it shares with the one before it; 0 for none."""
    alike, last = [], None
    for row in owners:
        own = next((n for n in _PLACES if row and n <= row.begun[1]), 0)
        known = row and last and row.begun[0] == last.begun[0]
        both = next((n for n in _PLACES if known and n <= min(own, last.begun[1]) and row.tokens[:n] == last.tokens[:n]), 0)
        alike.append((own, both))
        last = row or last
    return alike


def restricts(sampling: Sampling) -> bool:
    """Whether it drops tokens of the vocabulary."""
    return not (sampling.top_k is None and sampling.top_p is None and sampling.min_p is None)


def stacked(samplings: Sequence[Sampling], restricted: bool) -> Sampling:
    """One distribution for each row, arrays `[m]`. If no row is `restricted`, nothing is sorted."""
    def column(name, off):
        values = [getattr(s, name) for s in samplings]
        return np.asarray([off if value is None else value for value in values], off.dtype)
    temperature = column("temperature", np.float32(1))
    return Sampling(temperature, **{name: column(name, off) for name, off in OFF.items()} if restricted else {})

"""The lanes of a chunk: which rows it decodes, and what the device needs to know about them."""
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.generation.requests import Row
from jaxrl_llm.generation.sampling import Sampling
from jaxrl_llm.generation.slots import Lanes

FEWEST = 8  # lanes of a chunk: a step of fewer rows takes as long as reading the weights


def lane_counts(rows: int) -> tuple[int, ...]:
    """The numbers of rows that a chunk may have: all, half or a quarter of them, if these are at least `FEWEST`."""
    return tuple(n for n in dict.fromkeys((rows, -(-rows // 2), -(-rows // 4))) if n == rows or n >= FEWEST)


def lanes_of(slots: Sequence[Row | None], count: int, stop_width: int) -> tuple[list[Row | None], Lanes]:
    """The rows of `slots` that have not ended in `count` lanes, filled up with other slots, which stay inert.

    Returns the rows, None for inert lanes, and what the device reads.
    """
    decoding = [None if row is None or row.ended else row for row in slots]
    idle = [slot for slot, row in enumerate(decoding) if row is None]
    running = [slot for slot, row in enumerate(decoding) if row]
    places = sorted(running + idle[:count - len(running)])
    owners = [decoding[slot] for slot in places]
    stops = np.full((count, stop_width), -1, np.int32)
    numbers = np.zeros((count, 5), np.int64)
    for i, row in enumerate(owners):
        if row is not None:
            stops[i, :len(row.request.stop_tokens)] = row.request.stop_tokens
            numbers[i] = row.request.stream, row.cached, row.tokens[-1], row.drawn, row.left
        elif slots[places[i]] is not None:
            numbers[i, 1] = slots[places[i]].cached  # a chunk writes behind what an ended row has cached
    uid, length, pending, drawn, left = numbers.T
    halves = np.stack([uid >> 32, uid & 0xFFFFFFFF], axis=1).astype(np.uint32)
    keyed = np.array([row is not None and row.request.key is not None for row in owners])
    for i in np.flatnonzero(keyed):
        halves[i] = owners[i].request.key
    length, pending, drawn, left = (x.astype(np.int32) for x in (length, pending, drawn, left))
    alive = np.array([row is not None for row in owners])
    sampling = stacked([Sampling() if row is None else row.request.sampling for row in owners])
    return owners, Lanes(np.asarray(places, np.int32), halves, keyed, length, pending, drawn, left, alive, stops, sampling)


def stacked(samplings: Sequence[Sampling]) -> Sampling:
    """One distribution for each row, arrays `[m]`. If no row restricts the vocabulary, nothing is sorted."""
    def column(name, off, dtype):
        values = [getattr(s, name) for s in samplings]
        return np.asarray([off if value is None else value for value in values], dtype)
    temperature = column("temperature", 1.0, np.float32)
    if all(s.top_k is None and s.top_p is None and s.min_p is None for s in samplings):
        return Sampling(temperature)
    return Sampling(temperature, column("top_k", np.iinfo(np.int32).max, np.int32), column("top_p", np.inf, np.float32),
                    column("min_p", 0.0, np.float32))

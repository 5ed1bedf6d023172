"""Caches of the engine's rows on the device: as long as the longest row needs, with prompts that are computed once."""
from collections import OrderedDict
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm.generation import slots as programs_of
from jaxrl_llm.generation.lanes import FEWEST
from jaxrl_llm.generation.requests import Row
from jaxrl_llm.generation.slots import Slots, Weights
from jaxrl_llm.models.transformer import Transformer

WIDTHS = (16, 64)  # tokens that go into a row at a time


class RowCaches:
    """What R rows have read.

    Attributes:
      slots: on the device; None where nothing is in them.
      prefixes: caches of prompts, those read last at the end, as many as there are rows.
      prefilled: how many prompt tokens were computed.
      programs: what was compiled, one entry for each combination of shapes.
    """

    def __init__(self, model: Transformer, device: jax.Device, rows: int, most: int, *, transposed: bool, programs: set[tuple]):
        """Caches of up to `most` places for each of the `rows`; `transposed` as the weights will be."""
        self._model, self._device, self._rows, self._transposed = model, device, rows, transposed
        self._rooms = rooms(most)
        self.slots: Slots | None = None
        self.prefixes: OrderedDict[tuple[int, ...], Slots] = OrderedDict()
        self.prefilled = 0
        self.programs = programs

    def clear(self) -> None:
        """Gives up all that lies on the device."""
        self.slots = None
        self.prefixes.clear()

    def make_room(self, length: int) -> None:
        """Caches of `length` places at least."""
        room = next(room for room in self._rooms if room >= length)
        if self.slots is None:
            self.slots = jax.device_put(programs_of.empty(self._model, self._rows, room), self._device)
        elif room > self.slots.room:
            self.programs.add(("lengthen", self.slots.room, room))
            self.slots = programs_of.lengthen(self.slots, room=room)

    def taken(self, slot: int, length: int) -> Slots:
        """A copy of the cache of a row with `length` filled places."""
        room = next(room for room in self._rooms if room >= length)
        self.programs.add(("take", self.slots.room, room))
        return programs_of.take(self.slots, np.int32(slot), room=room)

    def fill(self, weights: Weights, placed: Sequence[Row]) -> None:
        """What these rows have to read before they decode into the slots where they were placed."""
        self.make_room(max(len(row.tokens) for row in placed))
        prompts: dict[tuple[int, ...], list[Row]] = {}
        copies: dict[int, tuple[Slots, list[Row]]] = {}
        for row in placed:
            if row.cache is not None:
                copies.setdefault(id(row.cache), (row.cache, []))[1].append(row)
            elif len(row.tokens) > 1:
                prompts.setdefault(tuple(row.tokens[:-1]), []).append(row)
        for cache, rows in copies.values():
            self._put(cache, rows)
        first = [rows[0] for prompt, rows in prompts.items() if prompt not in self.prefixes]
        self.prefilled += sum(len(row.tokens) - 1 for row in first)
        self._feed(weights, [row for _, rows in copies.values() for row in rows] + first)
        for prompt, rows in prompts.items():
            self._share(prompt, rows)
        while len(self.prefixes) > self._rows:  # only now, as one of the oldest may just have been read again
            self.prefixes.popitem(last=False)
        for row in placed:
            row.cache = None

    def _share(self, prompt: tuple[int, ...], rows: list[Row]) -> None:
        """The cache of a prompt for all rows that begin with it; it is kept for others to come, as many as there are slots."""
        if prompt not in self.prefixes:
            leader, *rows = rows
            self.prefixes[prompt] = self.taken(leader.slot, len(prompt))
        self.prefixes.move_to_end(prompt)
        for row in rows:
            row.cached = len(prompt)
        self._put(self.prefixes[prompt], rows)

    def _put(self, cache: Slots, rows: list[Row]) -> None:
        """A copy of a cache into the slots of these rows."""
        self.make_room(cache.room)
        while rows:
            part, rows = rows[:FEWEST], rows[FEWEST:]
            places = _padded([row.slot for row in part], self._rows, 1 if len(part) == 1 else FEWEST)
            self.programs.add(("put", len(places), cache.room, self.slots.room))
            self.slots = programs_of.put(self.slots, jax.device_put(cache, self._device), places)

    def _feed(self, weights: Weights, rows: list[Row]) -> None:
        """What these rows have to read, all but their last tokens, into their caches: some of each at a time."""
        while rows := [row for row in rows if row.cached < len(row.tokens) - 1]:
            part = rows[:FEWEST]
            longest = max(len(row.tokens) - 1 - row.cached for row in part)
            width = next((w for w in WIDTHS if w >= longest), WIDTHS[-1])
            lanes = 1 if len(part) == 1 else FEWEST
            tokens = np.zeros((lanes, width), np.int32)
            for line, row in zip(tokens, part):
                read = row.tokens[row.cached:len(row.tokens) - 1][:width]
                line[:len(read)] = read
            self.make_room(max(row.cached for row in part) + width)
            slot = _padded([row.slot for row in part], self._rows, lanes)
            length = _padded([row.cached for row in part], 0, lanes)
            self.programs.add(("extend", lanes, width, self.slots.room))
            self.slots = programs_of.extend(self._model, weights, self.slots, slot, length, tokens, transposed=self._transposed)
            for row in part:
                row.cached = min(row.cached + width, len(row.tokens) - 1)


def rooms(most: int) -> tuple[int, ...]:
    """Lengths of caches, the last of them of `most` places at least: up to four multiples of 32, as `sampler.stages`."""
    count = min(4, -(-most // 32))
    return tuple(-(-most * k // (count * 32)) * 32 for k in range(1, count + 1))


def _padded(values: Sequence[int], fill: int, count: int) -> np.ndarray:
    """i32[count]"""
    return np.asarray([*values, *[fill] * (count - len(values))], np.int32)

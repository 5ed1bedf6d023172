"""KV caches of the engine's rows on the device, as long as the longest row needs; each prompt is computed once."""
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.engines import reserve as programs_of_reserve
from jaxrl_llm.engines import slots as programs_of
from jaxrl_llm.engines.lanes import FEWEST, Common, common_places, shapes_of
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.engines.reserve import Entries, Following
from jaxrl_llm.engines.slots import Drawn, Lanes, Slots, Weights
from jaxrl_llm.models.transformer import Transformer

WIDTHS = (16, 32, 64)  # tokens that go into a row at a time
_LANES = (1, 4, 8)  # rows that are read together, unless all are
_MOST = 2048  # tokens that are read together, padding included: more are no quicker


class Prefix(NamedTuple):
    """The cache of a prompt: one of the rows of a `block`."""

    block: Slots
    row: int


class Prompts(NamedTuple):
    """Caches of the prompts of several rows: for each of them, which of the rows of a `block` is its prompt's."""

    block: Slots
    rows: list[int]


class RowCaches:
    """The KV caches of R rows.

    Attributes:
      slots: the slots on the device; None while no row is in them.
      near: maximum places of sliding-window layers; None if there are none.
      prefixes: caches of prompts, at most as many as rows, the most recently read last.
      prefilled: number of prompt tokens computed, not copied.  read: the same, plus the tokens that others wrote into rows.
      programs: the compiled programs, one entry for each combination of shapes.
    """

    def __init__(self, model: Transformer, device: jax.Device, rows: int, tokens: int, chunk: int, *, transposed: bool,
                 programs: set[tuple], columns: tuple[str, ...] = ()):
        """Caches of rows of up to `tokens` tokens that decode up to `chunk` at a time; `transposed`: weights may be that.

        `columns`: names of the further token columns that decoding measures.
        """
        self._columns = columns
        self._model, self._device, self._rows, self._transposed = model, device, rows, transposed
        most, local = max(tokens, chunk), model.config.local_layers
        self.near = near_places(model.config.window, chunk) if any(local) else None
        self._rooms = rooms(most if self.near is None or not all(local) else min(most, self.near))
        self.slots: Slots | None = None
        self.prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self.prefilled, self.read = 0, 0
        self.programs = programs

    def clear(self) -> None:
        """Drops all device arrays."""
        self.slots = None
        self.prefixes.clear()

    def forget_prefixes(self) -> None:
        """Drops caches of prompts, of weights that are no longer in use."""
        self.prefixes.clear()

    def rest(self) -> None:
        """Drops the slots while no row is in them: short ones suffice again."""
        self.slots = None

    def fork(self, row: Row) -> None:
        """Joins a new row to its source, if it has one."""
        if row.source is not None:
            row.source.forks.append(row)

    def leave(self, row: Row) -> None:
        """Keeps the cache of an idle row, whose slot another one needs."""
        row.cache = self.copy(row)

    def forget(self, row: Row) -> None:
        """Drops the cache of a row; forks of it that still wait for a slot get a copy."""
        if row.forks:
            self.copy(row)
        if row.source is not None:
            row.source.forks.remove(row)

    def copy(self, row: Row) -> Slots:
        """The cache of a row in a slot, on the host, where forks that wait for a slot have it from now on."""
        cache = jax.device_get(self.taken(row.slot, row.cached))
        for fork in row.forks:
            fork.cache, fork.source = cache, None
        row.forks.clear()
        return cache

    def common(self, owners: Sequence[Row | None]) -> Common:
        """What the caches of the lanes of these rows share."""
        return Common(0, ()) if all(self._model.config.local_layers) else common_places(owners)

    def reserve(self, weights: Weights, queue: Sequence[Row]) -> Prompts | None:
        """The prompts of the first waiting rows, at most eight different ones, computed if need be; None for none.

        Rows that have read more than a prompt are not among them. Sliding-window layers do not support it.
        """
        own = [*itertools.takewhile(bool, (prompt_of(row) if row.new else () for row in itertools.islice(queue, self._rows)))]
        prompts = [*dict.fromkeys(own)][:_LANES[-1]]
        if not prompts or self.near is not None:
            return None
        self._compute(weights, prompts, queue)
        for prompt in prompts:
            self.prefixes.move_to_end(prompt)
        block, rows = self._together(prompts)
        self._forget_oldest()
        return Prompts(block, [rows[prompt] for prompt in itertools.takewhile(rows.__contains__, own)])

    def _together(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Slots, dict[tuple[int, ...], int]]:
        """A block with known prompts, and their rows; blocks have one size, as each is one more program for a chunk."""
        (first, which, where), *others = _by_block([(len(prompt), self.prefixes[prompt]) for prompt in prompts])
        if not others and first.rows == _LANES[-1]:
            return first, dict(zip(prompts, which))
        block = self._picked(first, which, where, _LANES[-1])
        for source, which, where in others:
            block = self._copied(self._lengthened(block, source.room), source, which, where)
        return block, {prompt: i for i, prompt in enumerate(prompts)}

    def decode(self, weights: Weights, owners: Sequence[Row | None], lanes: Lanes, key, patience: int, common: Common,
               following: Following | None, *, steps: int, ahead: int) -> tuple[Lanes, Drawn, Entries | None]:
        """Decodes a chunk for the rows of these lanes, `ahead` steps of which are in flight; see `slots.decode`.

        With rows that follow others in it all slots decode; see `reserve.decode`.
        """
        rows = [row for row in owners if row and row.decodes] + (following.rows if following else [])
        self.make_room(max(steps, *(len(row.tokens) - 1 + min(ahead + steps, row.left) for row in rows)))
        if following is not None:
            self.programs.add(("decode_with_reserve", len(owners), steps, self.slots.room, *shapes_of(lanes),
                               following.reserve.block.room))
            self.slots, lanes, drawn, entries = programs_of_reserve.decode(
                self._model, weights, self.slots, lanes, key, np.int32(patience), following.reserve, following.entered,
                steps=steps, transposed=self._transposed, columns=self._columns)
            return lanes, drawn, entries
        self.programs.add(("decode", len(owners), steps, self.slots.room, *shapes_of(lanes), common.places,
                           len(common.leaders)))
        self.slots, lanes, drawn = programs_of.decode(
            self._model, weights, self.slots, lanes, key, np.int32(patience), np.asarray(common.leaders, np.int32), steps=steps,
            common=common.places, near=self.near, transposed=self._transposed, columns=self._columns)
        return lanes, drawn, None

    def make_room(self, length: int) -> None:
        """Makes or lengthens the caches so that each has at least `length` places."""
        if self.slots is None:
            self.slots = jax.device_put(programs_of.empty(self._model, self._rows, self._room(length), self.near), self._device)
        else:
            self.slots = self._lengthened(self.slots, length)

    def _room(self, length: int) -> int:
        return next((room for room in self._rooms if room >= length), self._rooms[-1])

    def _lengthened(self, slots: Slots, length: int) -> Slots:
        room = self._room(length)
        if room <= slots.room:
            return slots
        self.programs.add(("lengthen", slots.rows, slots.room, room))
        return programs_of.lengthen(self._model, slots, room=room, near=self.near)

    def taken(self, slot: int, length: int) -> Slots:
        """A copy of the cache of a row with `length` filled places."""
        room = self._room(length)
        self.programs.add(("take", self.slots.room, room))
        return programs_of.take(self.slots, np.int32(slot), room=room)

    def fill(self, weights: Weights, placed: Sequence[Row], waiting: Iterable[Row], decoding: Iterable[Row]) -> None:
        """Writes what the `placed` rows, some of those `decoding`, must read before they decode into their slots.

        Prompts of rows that are `waiting` for a slot are computed together with those of the placed rows.
        """
        if self.near is not None:  # else places stay as they are, and forks copy them from slot to slot
            for row in decoding:
                if any(fork.slot is None for fork in row.forks):
                    self.copy(row)
        if not placed:
            return
        self.make_room(max(len(row.tokens) for row in placed))
        copies: dict[int, tuple[Slots, list[tuple[int, Row]]]] = {}
        for row in placed:
            if row.cache is not None:
                copies.setdefault(id(row.cache), (row.cache, []))[1].append((0, row))
        for cache, entries in copies.values():
            self._put(jax.device_put(cache, self._device), entries)
        if forks := [(row.source.slot, row) for row in placed if row.source is not None]:
            self._put(None, forks)
        self._go_on(weights, [(row.slot, row.tokens[row.cached:-1], row.cached) for row in placed if row.cached])
        rows = [(prompt, row) for row in placed if not row.cached and (prompt := prompt_of(row))]
        self._compute(weights, [prompt for prompt, _ in rows], waiting)
        blocks: dict[int, tuple[Slots, list[tuple[int, Row]]]] = {}
        for prompt, row in rows:
            self.prefixes.move_to_end(prompt)
            block, i = self.prefixes[prompt]
            blocks.setdefault(id(block), (block, []))[1].append((i, row))
        for block, entries in blocks.values():
            self._put(block, entries)
        self._forget_oldest()
        for row in placed:
            if row.source is not None:
                row.source.forks.remove(row)
            row.source, row.cache, row.cached = None, None, len(row.tokens) - 1

    def _forget_oldest(self) -> None:
        """Drops prompts that are too many, once those that are needed have been read again."""
        while len(self.prefixes) > self._rows:
            self.prefixes.popitem(last=False)

    def _compute(self, weights: Weights, prompts: Iterable[tuple[int, ...]], waiting: Iterable[Row]) -> None:
        """Computes the missing prefixes of these prompts, a few at a time, together with some prompts of waiting rows."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.prefixes]
        new = with_waiting(missing, self.prefixes, waiting, self._rows)
        while new:
            part, new = new[:_LANES[-1]], new[_LANES[-1]:]
            block = self._block(weights, part)
            self.prefixes |= {prompt: Prefix(block, i) for i, prompt in enumerate(part)}

    def _block(self, weights: Weights, prompts: Sequence[tuple[int, ...]]) -> Slots:
        """A block with these prompts in its rows; what a known prompt begins with too is copied from there."""
        rows, starts = lanes_for(len(prompts)), [self._start(prompt) for prompt in prompts]
        computed = sum(map(len, prompts)) - sum(before for before, _ in starts)
        self.prefilled, self.read = self.prefilled + computed, self.read + computed
        copies, fresh = _by_block(starts), [() if source else prompt for prompt, (_, source) in zip(prompts, starts)]
        room = max([self._room(sum(widths_of(max(map(len, prompts))))), *(block.room for block, _, _ in copies)])
        width = widths_of(max(map(len, fresh)))[0] if any(fresh) else 0
        if width:
            self.programs.add(("prefill", rows, width, room))
            block = programs_of.prefill(self._model, weights, lines(fresh, rows, width), room=room, near=self.near)
        else:
            block, copies = self._lengthened(self._picked(*copies[0], rows), room), copies[1:]
        for source, which, where in copies:
            block = self._copied(block, source, which, where)
        entries = [(i, prompt, before or width) for i, (prompt, (before, _)) in enumerate(zip(prompts, starts))]
        return self._extended(weights, block, [(i, prompt[before:], before) for i, prompt, before in entries])

    def _start(self, prompt: tuple[int, ...]) -> tuple[int, Prefix | None]:
        """How many tokens a prompt shares with the known one that begins most like it, and that one's cache, None for none.

        Sliding-window layers do not keep their first places.
        """
        before, other = shared_beginning(prompt, self.prefixes if self.near is None else (), WIDTHS[-1])
        return before, self.prefixes[other] if before else None

    def _picked(self, block: Slots, which: Sequence[int], where: Sequence[int], rows: int) -> Slots:
        """A block of `rows` with rows `which` of another one in its rows `where`."""
        source = np.zeros(rows, np.int32)
        source[list(where)] = which
        self.programs.add(("pick", block.rows, block.room, rows))
        return programs_of.pick(block, source)

    def _go_on(self, weights: Weights, entries: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Writes tokens into the slots in use, rows with about as many tokens together, see `_extended`."""
        self.read += sum(len(tokens) for _, tokens, _ in entries)
        self.slots = self._extended(weights, self.slots, sorted(entries, key=lambda entry: len(entry[1])))

    def _extended(self, weights: Weights, slots: Slots, entries: Sequence[tuple[int, Sequence[int], int]]) -> Slots:
        """The slots after each entry `(slot, tokens, number of tokens before them)` is written, some tokens at a time."""
        while entries := [entry for entry in entries if len(entry[1])]:
            count, lanes, width = together([len(tokens) for _, tokens, _ in entries], slots.rows)
            part, entries = entries[:count], entries[count:]
            slots = self._lengthened(slots, max(width, *(before + len(tokens[:width]) for _, tokens, before in part)))
            slot = _padded([slot for slot, _, _ in part], slots.rows, lanes)
            length = _padded([before for _, _, before in part], 0, lanes)
            self.programs.add(("extend", lanes, width, slots.rows, slots.room))
            slots = programs_of.extend(self._model, weights, slots, slot, length,
                                       lines([tokens for _, tokens, _ in part], lanes, width), near=self.near,
                                       transposed=self._transposed)
            entries = [(slot, tokens[width:], before + width) for slot, tokens, before in part] + entries
        return slots

    def _put(self, block: Slots | None, entries: Sequence[tuple[int, Row]]) -> None:
        """Copies rows of a block, or of the slots themselves (None), into slots.

        Each entry is `(row of the block, row whose slot receives it)`.
        """
        if block is not None:
            self.make_room(block.room)
        self.slots = self._copied(self.slots, block, [i for i, _ in entries], [row.slot for _, row in entries])

    def _copied(self, slots: Slots, block: Slots | None, which: Sequence[int], where: Sequence[int]) -> Slots:
        """The slots with rows `which` of a block, or of the slots themselves (None), in their rows `where`."""
        count = next(n for n in (1, FEWEST, slots.rows) if n >= len(which))
        self.programs.add(("put", count, *((block.rows, block.room, slots.rows) if block is not None else ()), slots.room))
        return programs_of.put(slots, block, _padded(which, 0, count), _padded(where, slots.rows, count))


def lanes_for(count: int) -> int:
    """The rows of a program that reads `count` rows, at most 8."""
    return next(n for n in _LANES if n >= count)


def together(lengths: Sequence[int], rows: int) -> tuple[int, int, int]:
    """How texts of these lengths, about in order, go into slots: `(number of the first ones, lanes, width)` of the next call.

    All go at once if they fill three quarters of the `rows` and most are as wide as the longest: larger products are quicker.
    """
    count, width = len(lengths), widths_of(max(lengths))[0]
    if 4 * count >= 3 * rows > 3 * _LANES[-1] and rows * width <= _MOST and widths_of(sorted(lengths)[count // 4])[0] == width:
        return count, rows, width
    count = min(count, _LANES[-1])
    return count, lanes_for(count), widths_of(max(lengths[:count]))[0]


def widths_of(length: int) -> tuple[int, ...]:
    """The widths that `length` tokens are cut into: the largest, and one that holds the rest."""
    most = WIDTHS[-1]
    return (most,) * ((length - 1) // most) + (next(w for w in WIDTHS if w >= (length - 1) % most + 1),)


def lines(tokens: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """i32[rows, width] with the first tokens of each, 0 behind them."""
    lines = np.zeros((rows, width), np.int32)
    for line, own in zip(lines, tokens):
        line[:len(own[:width])] = own[:width]
    return lines


def with_waiting(prompts: list[tuple[int, ...]], known: Iterable[tuple[int, ...]], waiting: Iterable[Row], rows: int
                 ) -> list[tuple[int, ...]]:
    """The prompts to compute, and unknown ones of `waiting` rows that are no longer: a few together cost as much as one."""
    spare = min(-len(prompts) % _LANES[-1], rows - len(prompts))
    if not prompts or spare <= 0:
        return prompts
    longest, there = max(map(len, prompts)), {*prompts, *known}
    others = (prompt_of(row) for row in itertools.islice(waiting, rows) if not row.cached)
    return prompts + list(dict.fromkeys(p for p in others if p and p not in there and len(p) <= longest))[:spare]


def shared_beginning(prompt: tuple[int, ...], known: Iterable[tuple[int, ...]], step: int) -> tuple[int, tuple[int, ...]]:
    """How many tokens, in whole steps, a prompt shares with the known one that begins most like it, and that one."""
    return max(((_alike(prompt, other, step), other) for other in known), key=lambda start: start[0], default=(0, ()))


def _alike(prompt: tuple[int, ...], other: tuple[int, ...], step: int) -> int:
    """How many tokens two prompts begin with alike, in whole steps."""
    most = min(len(prompt), len(other))
    return next(n for n in range(0, most + 1, step) if n + step > most or prompt[n:n + step] != other[n:n + step])


def _by_block(starts: Sequence[tuple[int, Prefix | None]]) -> list[tuple[Slots, list[int], list[int]]]:
    """What is copied from each block: `(block, rows of it, numbers of the starts)`."""
    copies: dict[int, tuple[Slots, list[int], list[int]]] = {}
    for i, (_, source) in enumerate(starts):
        if source is not None:
            _, which, where = copies.setdefault(id(source.block), (source.block, [], []))
            which.append(source.row)
            where.append(i)
    return list(copies.values())


def prompt_of(row: Row) -> tuple[int, ...]:
    """What a row with an empty cache must read before it decodes: all but its last token."""
    return tuple(row.tokens[:-1])


def rooms(most: int) -> tuple[int, ...]:
    """Cache lengths, up to four multiples of 32 as in `sampler.stages`; the last has at least `most` places."""
    count = min(4, -(-most // 32))
    return tuple(-(-most * k // (count * 32)) * 32 for k in range(1, count + 1))


def near_places(window: int, chunk: int) -> int:
    """Places that a sliding-window layer keeps, a multiple of 32.

    Behind a row's last token there may be two chunks, one of them dispatched ahead, or tokens of others up to a whole width.
    """
    return -(-(window + max(2 * chunk, WIDTHS[-1])) // 32) * 32


def _padded(values: Sequence[int], fill: int, count: int) -> np.ndarray:
    """i32[count]"""
    return np.asarray([*values, *[fill] * (count - len(values))], np.int32)

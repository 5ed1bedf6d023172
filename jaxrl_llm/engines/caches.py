"""KV caches of the engine's rows on the device, as long as the longest row needs; each prompt is computed once."""
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_llm.engines import reserve as programs_of_reserve
from jaxrl_llm.engines import slots as programs_of
from jaxrl_llm.engines.lanes import FEWEST, Common, common_places, shapes_of
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.engines.reserve import Entries, Following
from jaxrl_llm.engines.shards import Shards, pieces_of
from jaxrl_llm.engines.slots import Drawn, Lanes, Slots, Weights
from jaxrl_llm.models.transformer import Transformer

WIDTHS = (16, 32, 64)  # tokens that go into a row at a time
_LANES = (1, 4, 8)  # rows that are read together, unless all are
_MOST = 2048  # tokens that are read together, padding included: more are no quicker


class Prefix(NamedTuple):
    """The cache of a prompt: one of the rows of a `block`."""

    block: Slots
    row: int


T = TypeVar("T")
Entry = TypeVar("Entry", bound=tuple[Any, ...])
Prompt = tuple[int, tuple[int, ...]]  # the shard in which it is read, and its tokens


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

    def __init__(self, model: Transformer, shards: Shards, tokens: int, chunk: int, *, transposed: bool, programs: set[tuple],
                 columns: tuple[str, ...] = ()):
        """Caches of rows of up to `tokens` tokens that decode up to `chunk` at a time; `transposed`: weights may be that.

        `columns`: names of the further token columns that decoding measures.
        """
        self._columns, self._shards, self._rows = columns, shards, shards.parts * shards.rows
        self._model, self._mesh, self._transposed = model, shards.mesh, transposed
        most, local = max(tokens, chunk), model.config.local_layers
        self.near = near_places(model.config.window, chunk) if any(local) else None
        self._rooms = rooms(most if self.near is None or not all(local) else min(most, self.near))
        self.slots: Slots | None = None
        self.prefixes: OrderedDict[Prompt, Prefix] = OrderedDict()
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

    def home(self, row: Row) -> int | None:
        """The shard that has the cache of a row which waits for a slot; None: any may have it."""
        return None if row.source is None or row.source.slot is None else self._shards.of(row.source.slot)

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
        cache = self.taken(row.slot, row.cached)
        for fork in row.forks:
            fork.cache, fork.source = cache, None
        row.forks.clear()
        return cache

    def common(self, owners: Sequence[Row | None]) -> Common:
        """What the caches of the lanes of these rows share."""
        return Common(0, ()) if all(self._model.config.local_layers) else common_places(owners, self._shards.parts)

    def reserve(self, weights: Weights, queue: Sequence[Row]) -> Prompts | None:
        """The prompts of the first waiting rows, at most eight different ones, computed if need be; None for none.

        Rows that have read more than a prompt are not among them. Sliding-window layers do not support it, nor do meshes.
        """
        own = [*itertools.takewhile(bool, (prompt_of(row) if row.new else () for row in itertools.islice(queue, self._rows)))]
        prompts = [*dict.fromkeys(own)][:_LANES[-1]]
        if not prompts or self.near is not None or self._mesh is not None:
            return None
        self._compute(weights, [(0, prompt) for prompt in prompts], queue)
        for prompt in prompts:
            self.prefixes.move_to_end((0, prompt))
        block, rows = self._together(prompts)
        self._forget_oldest()
        return Prompts(block, [rows[prompt] for prompt in itertools.takewhile(rows.__contains__, own)])

    def _together(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Slots, dict[tuple[int, ...], int]]:
        """A block with known prompts, and their rows; blocks have one size, as each is one more program for a chunk."""
        (first, copies), *others = _by_block([(i, self.prefixes[0, prompt]) for i, prompt in enumerate(prompts)])
        if not others and first.rows == _LANES[-1]:
            return first, dict(zip(prompts, (row for row, _ in copies)))
        block = self._picked(first, copies, _LANES[-1])
        for source, copies in others:
            block = self._copied(self._lengthened(block, source.room), source, copies)
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
        leaders = np.asarray([slot % self._shards.rows for slot in common.leaders], np.int32)
        self.slots, lanes, drawn = programs_of.decode(
            self._model, weights, self.slots, lanes, key, np.int32(patience), leaders, steps=steps, common=common.places,
            near=self.near, transposed=self._transposed, columns=self._columns, mesh=self._mesh,
            pieces=pieces_of(self._mesh, self._model.config.num_kv_heads))
        return lanes, drawn, None

    def make_room(self, length: int) -> None:
        """Makes or lengthens the caches so that each has at least `length` places."""
        if self.slots is None:
            self.slots = self._shards.zeros(programs_of.empty(self._model, self._rows, self._room(length), self.near), heads=1)
        else:
            self.slots = self._lengthened(self.slots, length)

    def _room(self, length: int) -> int:
        return next((room for room in self._rooms if room >= length), self._rooms[-1])

    def _lengthened(self, slots: Slots, length: int) -> Slots:
        room = self._room(length)
        if room <= slots.room:
            return slots
        self.programs.add(("lengthen", slots.rows, slots.room, room))
        return programs_of.lengthen(self._model, slots, room=room, near=self.near, mesh=self._mesh)

    def taken(self, slot: int, length: int) -> Slots:
        """A copy on the host of the cache of a row with `length` filled places."""
        room = self._room(length)
        self.programs.add(("take", self.slots.room, room))
        of_shards = programs_of.take(self.slots, np.int32(slot % self._shards.rows), room=room, mesh=self._mesh)
        return self._shards.fetched(of_shards, self._shards.of(slot))

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
                copies.setdefault(id(row.cache), (row.cache, []))[1].append((self._shards.of(row.slot), row))
        for cache, entries in copies.values():
            self._put(self._shards.by_row(self._of_each_shard(cache), heads=1), entries)
        if forks := [(row.source.slot, row) for row in placed if row.source is not None]:
            self._put(None, forks)
        self._go_on(weights, [(row.slot, row.tokens[row.cached:-1], row.cached) for row in placed if row.cached])
        rows = [((self._shards.of(row.slot), prompt), row) for row in placed if not row.cached and (prompt := prompt_of(row))]
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
        """Drops prompts that are too many, once those that are needed have been read again.

        On a mesh a block has as many rows in each shard, also where a single one of them is a prompt's.
        """
        while len(self.prefixes) > self._rows or self._shards.parts > 1 and self._kept() > 2 * self._rows:
            self.prefixes.popitem(last=False)

    def _kept(self) -> int:
        """Rows of the blocks that have prompts."""
        return sum({id(one.block): one.block.rows for one in self.prefixes.values()}.values())

    def _of_each_shard(self, cache: Slots) -> Slots:
        """A row on the host, once for each shard."""
        return jax.tree.map(lambda x: np.broadcast_to(x, (self._shards.parts, *x.shape[1:])), cache)

    def _compute(self, weights: Weights, prompts: Iterable[Prompt], waiting: Iterable[Row]) -> None:
        """Computes the missing prefixes of these prompts, a few at a time, together with some prompts of waiting rows."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.prefixes]
        if self._mesh is None:  # else nobody knows in which shard rows will be that wait
            known = [prompt for _, prompt in self.prefixes]
            new = [(0, prompt) for prompt in with_waiting([prompt for _, prompt in new], known, waiting, self._rows)]
        while new:
            parts = [[prompt for prompt in new if prompt[0] == shard][:_LANES[-1]] for shard in range(self._shards.parts)]
            block = self._block(weights, parts)
            self.prefixes |= {prompt: Prefix(block, row) for row, prompt in numbered(parts, block.rows // self._shards.parts)}
            new = [prompt for prompt in new if prompt not in self.prefixes]

    def _block(self, weights: Weights, parts: Sequence[Sequence[Prompt]]) -> Slots:
        """A block with these prompts of each shard in its rows; what a known prompt begins with too is copied from there."""
        rows = self._shards.parts * lanes_for(max(map(len, parts)))
        starts = [(row, prompt, *self._start(prompt)) for row, prompt in numbered(parts, rows // self._shards.parts)]
        computed = sum(len(tokens) - before for _, (_, tokens), before, _ in starts)
        self.prefilled, self.read = self.prefilled + computed, self.read + computed
        copies = _by_block([(row, source) for row, _, _, source in starts if source is not None])
        fresh = [(row, tokens) for row, (_, tokens), _, source in starts if source is None]
        longest = max(len(tokens) for _, (_, tokens), *_ in starts)
        room = max([self._room(sum(widths_of(longest))), *(block.room for block, _ in copies)])
        width = widths_of(max(len(tokens) for _, tokens in fresh))[0] if fresh else 0
        if width:
            self.programs.add(("prefill", rows, width, room))
            block = programs_of.prefill(self._model, weights, lines(fresh, rows, width), room=room, near=self.near,
                                        mesh=self._mesh)
        else:
            block, copies = self._lengthened(self._picked(*copies[0], rows), room), copies[1:]
        for source, pairs in copies:
            block = self._copied(block, source, pairs)
        entries = [(row, tokens, before or width) for row, (_, tokens), before, _ in starts]
        return self._extended(weights, block, [(row, tokens[before:], before) for row, tokens, before in entries])

    def _start(self, prompt: Prompt) -> tuple[int, Prefix | None]:
        """How many tokens a prompt shares with the known one that begins most like it, and that one's cache, None for none.

        Sliding-window layers do not keep their first places.
        """
        shard, tokens = prompt
        known = [other for there, other in self.prefixes if there == shard] if self.near is None else []
        before, other = shared_beginning(tokens, known, WIDTHS[-1])
        return before, self.prefixes[shard, other] if before else None

    def _picked(self, block: Slots, copies: Sequence[tuple[int, int]], rows: int) -> Slots:
        """A block of `rows` with copies `(row of another block, row)`."""
        source, old = np.zeros(rows, np.int32), block.rows // self._shards.parts
        for row, to in copies:
            source[to] = row % old
        self.programs.add(("pick", block.rows, block.room, rows))
        return programs_of.pick(block, source, mesh=self._mesh)

    def _go_on(self, weights: Weights, entries: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Writes tokens into the slots in use, rows with about as many tokens together, see `_extended`."""
        self.read += sum(len(tokens) for _, tokens, _ in entries)
        self.slots = self._extended(weights, self.slots, sorted(entries, key=lambda entry: len(entry[1])))

    def _extended(self, weights: Weights, slots: Slots, entries: Sequence[tuple[int, Sequence[int], int]]) -> Slots:
        """The slots after each entry `(slot, tokens, number of tokens before them)` is written, some tokens at a time."""
        rows = slots.rows // self._shards.parts
        while entries := [entry for entry in entries if len(entry[1])]:
            part, rest, lanes, width = parted(entries, lambda entry: entry[0] // rows, rows, self._shards.parts)
            slots = self._lengthened(slots, max(width, *(before + min(len(tokens), width)
                                                         for own in part for _, tokens, before in own)))
            slot = self._shards.padded([[slot % rows for slot, _, _ in own] for own in part], rows, lanes)
            length = self._shards.padded([[before for _, _, before in own] for own in part], 0, lanes)
            self.programs.add(("extend", lanes, width, slots.rows, slots.room))
            tokens = lines([(row, tokens) for row, (_, tokens, _) in numbered(part, lanes)], len(slot), width)
            slots = programs_of.extend(self._model, weights, slots, slot, length, tokens, near=self.near,
                                       transposed=self._transposed, mesh=self._mesh)
            entries = [(slot, tokens[width:], before + width) for own in part for slot, tokens, before in own] + rest
        return slots

    def _put(self, block: Slots | None, entries: Sequence[tuple[int, Row]]) -> None:
        """Copies rows of a block, or of the slots themselves (None), into slots.

        Each entry is `(row of the block, row whose slot receives it)`.
        """
        if block is not None:
            self.make_room(block.room)
        self.slots = self._copied(self.slots, block, [(i, row.slot) for i, row in entries])

    def _copied(self, slots: Slots, block: Slots | None, copies: Sequence[tuple[int, int]]) -> Slots:
        """The slots with copies `(row of a block, or of the slots themselves (None), slot)`, each within a shard."""
        rows, old = (x.rows // self._shards.parts for x in (slots, slots if block is None else block))
        parts: list[list[tuple[int, int]]] = [[] for _ in range(self._shards.parts)]
        for row, slot in copies:
            parts[slot // rows].append((row % old, slot % rows))
        count = next(n for n in (1, FEWEST, rows) if n >= max(map(len, parts)))
        self.programs.add(("put", count, *((block.rows, block.room, slots.rows) if block is not None else ()), slots.room))
        which, where = (self._shards.padded([[pair[i] for pair in part] for part in parts], fill, count)
                        for i, fill in ((0, 0), (1, rows)))
        return programs_of.put(slots, block, which, where, mesh=self._mesh)


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


def parted(entries: Sequence[Entry], shard: Callable[[Entry], int], rows: int, shards: int
           ) -> tuple[list[list[Entry]], list[Entry], int, int]:
    """The entries `(..., tokens, before)` of each shard that are written next, the others, and lanes and width of the call."""
    parts: list[list[Entry]] = [[] for _ in range(shards)]
    for entry in entries:
        parts[shard(entry)].append(entry)
    sizes = [together([len(entry[-2]) for entry in part], rows) if part else (0, 0, 0) for part in parts]
    first = [part[:count] for part, (count, *_) in zip(parts, sizes)]
    rest = [entry for part, (count, *_) in zip(parts, sizes) for entry in part[count:]]
    return first, rest, max(lanes for _, lanes, _ in sizes), max(width for *_, width in sizes)


def lines(entries: Iterable[tuple[int, Sequence[int]]], rows: int, width: int) -> np.ndarray:
    """i32[rows, width] with the first tokens of each entry `(line, tokens)`, 0 elsewhere."""
    lines = np.zeros((rows, width), np.int32)
    for line, tokens in entries:
        lines[line, :len(tokens[:width])] = tokens[:width]
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


def _by_block(rows: Iterable[tuple[int, Prefix]]) -> list[tuple[Slots, list[tuple[int, int]]]]:
    """What is copied from each block into these rows: `(block, [(row of it, row)])`."""
    copies: dict[int, tuple[Slots, list[tuple[int, int]]]] = {}
    for row, source in rows:
        copies.setdefault(id(source.block), (source.block, []))[1].append((source.row, row))
    return list(copies.values())


def numbered(parts: Sequence[Sequence[T]], rows: int) -> list[tuple[int, T]]:
    """`(row, entry)` of entries that have the first of the `rows` of their shards."""
    return [(shard * rows + i, entry) for shard, part in enumerate(parts) for i, entry in enumerate(part)]


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

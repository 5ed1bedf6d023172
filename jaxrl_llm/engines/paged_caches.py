"""KV caches of the engine's rows in pages of a common pool: equal beginnings share them, and no row reserves what it may need.

Pages are counted: a row that writes into one that others use too writes into a copy of its own. Where the pool is full, prompts
that no row uses go first, then the caches of rows without a slot, to the host, then the other prompts.
"""
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxrl_llm.engines import pages as programs_of
from jaxrl_llm.engines.caches import Prompt, Prompts, lines, numbered, parted, prompt_of, shared_beginning, with_waiting
from jaxrl_llm.engines.lanes import Common, shapes_of
from jaxrl_llm.engines.pages import PAGE, Pool
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.engines.reserve import Entries, Following
from jaxrl_llm.engines.shards import Shards, pieces_of
from jaxrl_llm.engines.slots import Drawn, Lanes, Weights
from jaxrl_llm.kernels.choice import chosen
from jaxrl_llm.kernels.paged import head_axis, page_axis
from jaxrl_llm.models.transformer import Transformer

_RUNGS = 4  # sizes of the pool and of tables, each of which has programs of its own
_SPLIT = 16  # tables of as many pages and more have a multiple of it: GPUs cut them into that many parts


class PagedCaches:
    """The KV caches of R rows, with the contract of `RowCaches`.

    Attributes:
      pool: the pages on the device, as many of each shard; None before there are any.
      prefixes: pages of prompts, at most as many prompts as rows, the most recently read last.
      prefilled, read, programs: as in `RowCaches`.
    """

    def __init__(self, model: Transformer, shards: Shards, tokens: int, *, transposed: bool, programs: set[tuple],
                 columns: tuple[str, ...] = ()):
        """Caches of rows of up to `tokens` tokens. ValueError for a model whose caches cannot be paged."""
        check_model(model)
        self._columns, self._shards, self._rows = columns, shards, shards.parts * shards.rows
        self._model, self._mesh, self._transposed = model, shards.mesh, transposed
        most = pages_of(tokens)
        self._tables = rungs(most, _SPLIT if most >= _SPLIT * _RUNGS else 1)
        # One page more: the last of a prompt, which rows copy.
        self._sizes = tuple(1 + n for n in rungs(shards.rows * (most + 1), 1))
        self.programs, self.prefilled, self.read = programs, 0, 0
        self.clear()

    def clear(self) -> None:
        """Drops all device arrays."""
        self.pool: Pool | None = None
        self._free: list[list[int]] = [[] for _ in range(self._shards.parts)]
        self._users = np.zeros((self._shards.parts, self._sizes[-1]), np.int32)
        self.prefixes: OrderedDict[Prompt, list[int]] = OrderedDict()
        self._held: dict[Row, None] = {}  # rows that may have pages, the first to get some first

    def forget_prefixes(self) -> None:
        """Drops caches of prompts, of weights that are no longer in use."""
        for (shard, _), pages in self.prefixes.items():
            self._release(shard, pages)
        self.prefixes.clear()

    def rest(self) -> None:
        """Nothing to do while no row is in a slot: the pool stays as it is."""

    def fork(self, row: Row) -> None:
        """Gives a new row the pages of its source, if it has one."""
        if row.source is not None:
            shard = row.source.shard
            self._give(row, shard, self._shared(shard, row.source.pages[:pages_of(row.cached)]))
            row.source = None

    def home(self, row: Row) -> int | None:
        """The shard that has the cache of a row which waits for a slot; None: any may have it."""
        return row.shard if row.pages else None

    def leave(self, row: Row) -> None:
        """Nothing to do for an idle row whose slot another one needs: it keeps its pages."""

    def forget(self, row: Row) -> None:
        """Drops the cache of a row."""
        self._release(row.shard, row.pages)
        row.pages = []
        self._held.pop(row, None)

    def common(self, owners: Sequence[Row | None]) -> Common:
        """Nothing: the kernels read every row's pages by themselves."""
        return Common(0, ())

    def fill(self, weights: Weights, placed: Sequence[Row], waiting: Iterable[Row], decoding: Iterable[Row]) -> None:
        """Writes what the `placed` rows must read before they decode; `waiting` as in `RowCaches.fill`."""
        for row in placed:
            if row.cache is not None:
                self._bring_back(row)
            elif not row.pages:  # a prompt of one token gets none before its row decodes
                row.shard = self._shards.of(row.slot)
        rows = [((self._shards.of(row.slot), prompt), row) for row in placed if not row.cached and (prompt := prompt_of(row))]
        self._compute(weights, [prompt for prompt, _ in rows], waiting)
        for prompt, row in rows:
            self.prefixes.move_to_end(prompt)
            self._give(row, prompt[0], self._shared(prompt[0], self.prefixes[prompt]))
        more = [(row.shard, row.pages, row.tokens[row.cached:-1], row.cached) for row in placed if row.cached]
        self.read += sum(len(tokens) for *_, tokens, _ in more)
        self._extend(weights, more)
        while len(self.prefixes) > self._rows:
            self._drop_prefix()
        for row in placed:
            row.cached = len(row.tokens) - 1
            self._held[row] = None

    def reserve(self, weights: Weights, queue: Sequence[Row]) -> Prompts | None:
        """None: a chunk has its pages from the beginning."""
        return None

    def decode(self, weights: Weights, owners: Sequence[Row | None], lanes: Lanes, key, patience: int, common: Common,
               following: Following | None, *, steps: int, ahead: int) -> tuple[Lanes, Drawn, Entries | None]:
        """Decodes a chunk for the rows of these lanes, `ahead` steps of which are in flight; see `pages.decode`."""
        rows = [row if row and row.decodes else None for row in owners]
        self._reserve([(row.shard, row.pages, row.cached + min(ahead, row.left), row.cached + min(ahead + steps, row.left))
                       for row in rows if row])
        table = self._table([(lane, row.pages) for lane, row in enumerate(rows) if row], len(rows))
        self.programs.add(("decode", len(owners), steps, table.shape[1], self._size, *shapes_of(lanes)))
        self.pool, lanes, drawn = programs_of.decode(self._model, weights, self.pool, lanes, table, key, np.int32(patience),
                                                     steps=steps, transposed=self._transposed, columns=self._columns,
                                                     mesh=self._mesh,
                                                     pieces=pieces_of(self._mesh, self._model.config.num_kv_heads))
        return lanes, drawn, None

    # --- what rows read -----------------------------------------------------------------------------------------------------

    def _compute(self, weights: Weights, prompts: Iterable[Prompt], waiting: Iterable[Row]) -> None:
        """Computes the missing prefixes of these prompts, with some prompts of waiting rows if there are pages for them."""
        missing = new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.prefixes]
        if self._mesh is None:  # else nobody knows in which shard rows will be that wait
            known = [prompt for _, prompt in self.prefixes]
            new = [(0, prompt) for prompt in with_waiting([prompt for _, prompt in missing], known, waiting, self._rows)]
            if sum(pages_of(len(prompt)) for _, prompt in new) > self._left(0):
                new = missing
        needed = {*prompts, *new}
        while new:  # what begins as another one does waits until that one is read
            now: dict[Prompt, tuple[int, list[int], Sequence[int], int]] = {}
            later = []
            for shard, prompt in new:
                others = [other for there, other in (*self.prefixes, *now) if there == shard]
                before, known_one = shared_beginning(prompt, others, PAGE)
                if (shard, known_one) in now:
                    later.append((shard, prompt))
                else:
                    pages = self._shared(shard, self.prefixes[shard, known_one][:before // PAGE]) if before else []
                    now[shard, prompt] = shard, pages, prompt[before:], before
            self.prefixes |= {prompt: pages for prompt, (_, pages, *_) in now.items()}
            computed = sum(len(tokens) for *_, tokens, _ in now.values())
            self.prefilled, self.read = self.prefilled + computed, self.read + computed
            self._extend(weights, [*now.values()], needed)
            new = later

    def _extend(self, weights: Weights, entries: Sequence[tuple[int, list[int], Sequence[int], int]],
                needed: Iterable[Prompt] = ()) -> None:
        """Writes each entry `(shard, pages, tokens, number of tokens before them)`, some at a time; keeps `needed` prefixes."""
        entries = sorted((entry for entry in entries if len(entry[2])), key=lambda entry: len(entry[2]))
        self._reserve([(shard, pages, before, before + len(tokens)) for shard, pages, tokens, before in entries], needed)
        while entries := [entry for entry in entries if len(entry[2])]:
            parts, rest, lanes, width = parted(entries, lambda entry: entry[0], self._shards.rows, self._shards.parts)
            rows = numbered(parts, lanes)
            table = self._table([(i, pages[:pages_of(before + width)]) for i, (_, pages, _, before) in rows],
                                lanes * self._shards.parts)
            length, real = (self._shards.padded(numbers, 0, lanes) for numbers in (
                [[before for *_, before in part] for part in parts],
                [[len(tokens[:width]) for *_, tokens, _ in part] for part in parts]))
            self.programs.add(("extend", lanes, width, table.shape[1], self._size))
            tokens = lines([(i, tokens) for i, (_, _, tokens, _) in rows], len(length), width)
            self.pool = programs_of.extend(self._model, weights, self.pool, table, length, real, tokens,
                                           transposed=self._transposed, mesh=self._mesh)
            entries = [(shard, pages, tokens[width:], before + width)
                       for part in parts for shard, pages, tokens, before in part] + rest

    def _table(self, rows: Sequence[tuple[int, Sequence[int]]], lanes: int) -> np.ndarray:
        """i32[lanes, n], the pages of rows `(lane, pages)` and page 0 behind them."""
        width = next(n for n in self._tables if n >= max(len(pages) for _, pages in rows))
        table = np.zeros((lanes, width), np.int32)
        for lane, pages in rows:
            table[lane, :len(pages)] = pages
        return table

    # --- pages --------------------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        """Pages of the pool of a shard."""
        if self.pool is None:
            return 0
        return jax.tree.leaves(self.pool)[0].shape[page_axis(self._model.kernels)] // self._shards.parts

    def _left(self, shard: int) -> int:
        """Pages of a shard that can be had without anybody losing one."""
        return len(self._free[shard]) + self._sizes[-1] - max(self._size, 1)

    def _give(self, row: Row, shard: int, pages: list[int]) -> None:
        row.shard, row.pages = shard, pages
        self._held[row] = None

    def _shared(self, shard: int, pages: Sequence[int]) -> list[int]:
        """The same pages, with one user more."""
        for page in pages:
            self._users[shard, page] += 1
        return list(pages)

    def _release(self, shard: int, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[shard, page] -= 1
            if not self._users[shard, page]:
                self._free[shard].append(page)

    def _reserve(self, spans: Sequence[tuple[int, list[int], int, int]], needed: Iterable[Prompt] = ()) -> None:
        """Gives each list of pages of a shard those for places `begin` to `end`, for itself alone: shared ones are copied."""
        copies: list[list[tuple[int, int]]] = [[] for _ in range(self._shards.parts)]
        for shard, pages, begin, end in spans:
            for n in range(begin // PAGE, pages_of(end)):
                if n == len(pages):
                    pages.append(self._new(shard, needed))
                elif self._users[shard, pages[n]] > 1:
                    copies[shard].append((pages[n], new := self._new(shard, needed)))
                    self._release(shard, pages[n:n + 1])
                    pages[n] = new
        if any(copies):
            count = 1 << (max(map(len, copies)) - 1).bit_length()
            source, to = (self._shards.padded([[pair[i] for pair in part] for part in copies], 0, count) for i in (0, 1))
            self.programs.add(("copy", count, self._size))
            self.pool = programs_of.copy(self._model.kernels, self.pool, source, to, mesh=self._mesh)

    def _new(self, shard: int, needed: Iterable[Prompt]) -> int:
        """A page of a shard for one user."""
        while not self._free[shard]:
            if self._size < self._sizes[-1]:
                self._grow()
            elif not (self._drop_prefix(shard, needed, unused=True) or self._send_away(shard)
                      or self._drop_prefix(shard, needed)):
                raise RuntimeError(f"the rows in slots use all {self._size} pages, which is more than they can hold")
        page = self._free[shard].pop()
        self._users[shard, page] = 1
        return page

    def _grow(self) -> None:
        """Makes the pool, or takes its next size."""
        before, pages = max(self._size, 1), next(n for n in self._sizes if n > self._size)
        if self.pool is None:
            axis, heads = page_axis(self._model.kernels), head_axis(self._model.kernels)
            whole = programs_of.empty(self._model, pages * self._shards.parts)
            self.pool = self._shards.zeros(whole, axis, heads)
        else:
            self.programs.add(("lengthen", self._size, pages))
            self.pool = programs_of.lengthen(self._model.kernels, self.pool, pages=pages, mesh=self._mesh)
        for free in self._free:
            free += range(pages - 1, before - 1, -1)

    def _drop_prefix(self, shard: int | None = None, needed: Iterable[Prompt] = (), *, unused: bool = False) -> bool:
        """Drops the prompt that was read longest ago and is not `needed`, nor in use if `unused`; whether there is one.

        `shard`: None: of any shard.
        """
        oldest = next((prompt for prompt, pages in self.prefixes.items()
                       if shard in (None, prompt[0]) and prompt not in needed
                       and not (unused and (self._users[prompt[0], pages] > 1).any())), None)
        if oldest is not None:
            self._release(oldest[0], self.prefixes.pop(oldest))
        return oldest is not None

    def _send_away(self, shard: int) -> bool:
        """Copies the cache of a row without a slot, of those the first to have got pages, to the host; whether there is one."""
        row = next((row for row in self._held if row.slot is None and row.pages and row.shard == shard), None)
        if row is not None:
            row.cache = self._taken(shard, row.pages[:pages_of(row.cached)])
            self.forget(row)
        return row is not None

    def _taken(self, shard: int, pages: Sequence[int]) -> Pool:
        """Copies of some pages on the host, padded to the width of a table."""
        which = self._table([(shard, pages)], self._shards.parts)
        self.programs.add(("take", which.shape[1], self._size))
        taken = programs_of.take(self._model.kernels, self.pool, which.reshape(-1), mesh=self._mesh)
        return self._shards.fetched(taken, shard, page_axis(self._model.kernels))

    def _bring_back(self, row: Row) -> None:
        """Gives a row pages of the shard of its slot with what its copy on the host has."""
        pages, shard = list[int](), self._shards.of(row.slot)
        self._reserve([(shard, pages, 0, row.cached)])
        to = self._table([(shard, pages)], self._shards.parts)
        axis = page_axis(self._model.kernels)
        cache = jax.tree.map(lambda x: np.concatenate([x] * self._shards.parts, axis), row.cache)
        self.programs.add(("put", to.shape[1], self._size))
        self.pool = programs_of.put(self._model.kernels, self.pool,
                                    self._shards.by_row(cache, axis, head_axis(self._model.kernels)), to.reshape(-1),
                                    mesh=self._mesh)
        row.cache = None
        self._give(row, shard, pages)


def check_model(model: Transformer) -> None:
    """Raises ValueError for a model whose caches cannot be paged."""
    c = model.config
    if any(c.local_layers):
        raise ValueError("this model has sliding-window layers, whose caches keep the window alone; leave paged caches out")
    if model.int8_cache:
        raise ValueError("caches are either paged or in eight bits; leave one out")
    if chosen(model.kernels) == "tpu" and c.head_dim % 128:
        raise ValueError(f"this model has heads of {c.head_dim}; on TPUs paged caches are for multiples of 128, leave them out")


def pages_of(tokens: int) -> int:
    """Pages that hold this number of tokens."""
    return -(-tokens // PAGE)


def rungs(most: int, multiple: int) -> tuple[int, ...]:
    """Up to four numbers in equal steps, rounded up to a multiple; the last is at least `most`."""
    return tuple(dict.fromkeys(-(-most * k // (_RUNGS * multiple)) * multiple for k in range(1, _RUNGS + 1)))

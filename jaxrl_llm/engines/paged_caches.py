"""KV caches of the engine's rows in pages of a common pool: equal beginnings share them, and no row reserves what it may need.

Pages are counted: a row that writes into one that others use too writes into a copy of its own. Where the pool is full, prompts
that no row uses go first, then the caches of rows without a slot, to the host, then the other prompts.
"""
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxrl_llm.engines import pages as programs_of
from jaxrl_llm.engines.caches import Prompts, lines, prompt_of, shared_beginning, together, with_waiting
from jaxrl_llm.engines.lanes import Common, shapes_of
from jaxrl_llm.engines.pages import PAGE, Pool
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.engines.reserve import Entries, Following
from jaxrl_llm.engines.slots import Drawn, Lanes, Weights
from jaxrl_llm.kernels.choice import chosen
from jaxrl_llm.kernels.paged import page_axis
from jaxrl_llm.models.transformer import Transformer

_RUNGS = 4  # sizes of the pool and of tables, each of which has programs of its own
_SPLIT = 16  # tables of as many pages and more have a multiple of it: GPUs cut them into that many parts


class PagedCaches:
    """The KV caches of R rows, with the contract of `RowCaches`.

    Attributes:
      pool: the pages on the device; None before there are any.
      prefixes: pages of prompts, at most as many prompts as rows, the most recently read last.
      prefilled, read, programs: as in `RowCaches`.
    """

    def __init__(self, model: Transformer, device: jax.Device, rows: int, tokens: int, *, transposed: bool,
                 programs: set[tuple], columns: tuple[str, ...] = ()):
        """Caches of rows of up to `tokens` tokens. ValueError for a model whose caches cannot be paged."""
        check_model(model)
        self._columns = columns
        self._model, self._device, self._rows, self._transposed = model, device, rows, transposed
        most = pages_of(tokens)
        self._tables = rungs(most, _SPLIT if most >= _SPLIT * _RUNGS else 1)
        self._sizes = tuple(1 + n for n in rungs(rows * (most + 1), 1))  # one more: the last of a prompt, which rows copy
        self.programs, self.prefilled, self.read = programs, 0, 0
        self.clear()

    def clear(self) -> None:
        """Drops all device arrays."""
        self.pool: Pool | None = None
        self._free: list[int] = []
        self._users = np.zeros(self._sizes[-1], np.int32)
        self.prefixes: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()
        self._held: dict[Row, None] = {}  # rows that may have pages, the first to get some first

    def forget_prefixes(self) -> None:
        """Drops caches of prompts, of weights that are no longer in use."""
        for pages in self.prefixes.values():
            self._release(pages)
        self.prefixes.clear()

    def rest(self) -> None:
        """Nothing to do while no row is in a slot: the pool stays as it is."""

    def fork(self, row: Row) -> None:
        """Gives a new row the pages of its source, if it has one."""
        if row.source is not None:
            self._give(row, self._shared(row.source.pages[:pages_of(row.cached)]))
            row.source = None

    def leave(self, row: Row) -> None:
        """Nothing to do for an idle row whose slot another one needs: it keeps its pages."""

    def forget(self, row: Row) -> None:
        """Drops the cache of a row."""
        self._release(row.pages)
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
        rows = [(prompt, row) for row in placed if not row.cached and (prompt := prompt_of(row))]
        self._compute(weights, [prompt for prompt, _ in rows], waiting)
        for prompt, row in rows:
            self.prefixes.move_to_end(prompt)
            self._give(row, self._shared(self.prefixes[prompt]))
        more = [(row.pages, row.tokens[row.cached:-1], row.cached) for row in placed if row.cached]
        self.read += sum(len(tokens) for _, tokens, _ in more)
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
        self._reserve([(row.pages, row.cached + min(ahead, row.left), row.cached + min(ahead + steps, row.left))
                       for row in rows if row])
        table = self._table([row.pages if row else [] for row in rows])
        self.programs.add(("decode", len(owners), steps, table.shape[1], self._size, *shapes_of(lanes)))
        self.pool, lanes, drawn = programs_of.decode(self._model, weights, self.pool, lanes, table, key, np.int32(patience),
                                                     steps=steps, transposed=self._transposed, columns=self._columns)
        return lanes, drawn, None

    # --- what rows read -----------------------------------------------------------------------------------------------------

    def _compute(self, weights: Weights, prompts: Iterable[tuple[int, ...]], waiting: Iterable[Row]) -> None:
        """Computes the missing prefixes of these prompts, with some prompts of waiting rows if there are pages for them."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.prefixes]
        new = with_waiting(missing, self.prefixes, waiting, self._rows)
        if sum(pages_of(len(prompt)) for prompt in new) > self._left:
            new = missing
        needed = {*prompts, *new}
        while new:  # what begins as another one does waits until that one is read
            now, later = {}, []
            for prompt in new:
                before, known = shared_beginning(prompt, [*self.prefixes, *now], PAGE)
                if known in now:
                    later.append(prompt)
                else:
                    now[prompt] = self._shared(self.prefixes[known][:before // PAGE]) if before else [], prompt[before:], before
            self.prefixes |= {prompt: pages for prompt, (pages, *_) in now.items()}
            computed = sum(len(tokens) for _, tokens, _ in now.values())
            self.prefilled, self.read = self.prefilled + computed, self.read + computed
            self._extend(weights, [*now.values()], needed)
            new = later

    def _extend(self, weights: Weights, entries: Sequence[tuple[list[int], Sequence[int], int]],
                needed: Iterable[tuple[int, ...]] = ()) -> None:
        """Writes each entry `(pages, tokens, number of tokens before them)`, some tokens at a time; keeps `needed` prefixes."""
        entries = sorted((entry for entry in entries if len(entry[1])), key=lambda entry: len(entry[1]))
        self._reserve([(pages, before, before + len(tokens)) for pages, tokens, before in entries], needed)
        while entries := [entry for entry in entries if len(entry[1])]:
            count, lanes, width = together([len(tokens) for _, tokens, _ in entries], self._rows)
            part, entries = entries[:count], entries[count:]
            table = self._table([pages[:pages_of(before + width)] for pages, _, before in part], lanes)
            length, real = np.zeros((2, lanes), np.int32)
            length[:len(part)] = [before for *_, before in part]
            real[:len(part)] = [len(tokens[:width]) for _, tokens, _ in part]
            self.programs.add(("extend", lanes, width, table.shape[1], self._size))
            self.pool = programs_of.extend(self._model, weights, self.pool, table, length, real,
                                           lines([tokens for _, tokens, _ in part], lanes, width), transposed=self._transposed)
            entries = [(pages, tokens[width:], before + width) for pages, tokens, before in part] + entries

    def _table(self, rows: Sequence[Sequence[int]], lanes: int = 0) -> np.ndarray:
        """i32[lanes, n], the pages of each row and page 0 behind them; at least as many lanes as rows."""
        width = next(n for n in self._tables if n >= max(map(len, rows)))
        table = np.zeros((max(lanes, len(rows)), width), np.int32)
        for line, pages in zip(table, rows):
            line[:len(pages)] = pages
        return table

    # --- pages --------------------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        """Pages of the pool."""
        return 0 if self.pool is None else jax.tree.leaves(self.pool)[0].shape[page_axis(self._model.kernels)]

    @property
    def _left(self) -> int:
        """Pages that can be had without anybody losing one."""
        return len(self._free) + self._sizes[-1] - max(self._size, 1)

    def _give(self, row: Row, pages: list[int]) -> None:
        row.pages = pages
        self._held[row] = None

    def _shared(self, pages: Sequence[int]) -> list[int]:
        """The same pages, with one user more."""
        for page in pages:
            self._users[page] += 1
        return list(pages)

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _reserve(self, spans: Sequence[tuple[list[int], int, int]], needed: Iterable[tuple[int, ...]] = ()) -> None:
        """Gives each list of pages those for places `begin` to `end`, for itself alone: shared ones are copied."""
        copies: list[tuple[int, int]] = []
        for pages, begin, end in spans:
            for n in range(begin // PAGE, pages_of(end)):
                if n == len(pages):
                    pages.append(self._new(needed))
                elif self._users[pages[n]] > 1:
                    copies.append((pages[n], new := self._new(needed)))
                    self._release(pages[n:n + 1])
                    pages[n] = new
        if copies:
            count = 1 << (len(copies) - 1).bit_length()
            source, to = np.zeros((2, count), np.int32)
            source[:len(copies)], to[:len(copies)] = zip(*copies)
            self.programs.add(("copy", count, self._size))
            self.pool = programs_of.copy(self._model.kernels, self.pool, source, to)

    def _new(self, needed: Iterable[tuple[int, ...]]) -> int:
        """A page for one user."""
        while not self._free:
            if self._size < self._sizes[-1]:
                self._grow()
            elif not (self._drop_prefix(needed, unused=True) or self._send_away() or self._drop_prefix(needed)):
                raise RuntimeError(f"the rows in slots use all {self._size} pages, which is more than they can hold")
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _grow(self) -> None:
        """Makes the pool, or takes its next size."""
        before, pages = max(self._size, 1), next(n for n in self._sizes if n > self._size)
        if self.pool is None:
            self.pool = jax.device_put(programs_of.empty(self._model, pages), self._device)
        else:
            self.programs.add(("lengthen", self._size, pages))
            self.pool = programs_of.lengthen(self._model.kernels, self.pool, pages=pages)
        self._free += range(pages - 1, before - 1, -1)

    def _drop_prefix(self, needed: Iterable[tuple[int, ...]] = (), *, unused: bool = False) -> bool:
        """Drops the prompt that was read longest ago and is not `needed`, nor in use if `unused`; whether there is one."""
        oldest = next((prompt for prompt, pages in self.prefixes.items()
                       if prompt not in needed and not (unused and (self._users[pages] > 1).any())), None)
        if oldest is not None:
            self._release(self.prefixes.pop(oldest))
        return oldest is not None

    def _send_away(self) -> bool:
        """Copies the cache of a row without a slot, of those the first to have got pages, to the host; whether there is one."""
        row = next((row for row in self._held if row.slot is None and row.pages), None)
        if row is not None:
            row.cache = jax.device_get(self._taken(row.pages[:pages_of(row.cached)]))
            self.forget(row)
        return row is not None

    def _taken(self, pages: Sequence[int]) -> Pool:
        """Copies of some pages, padded to the width of a table."""
        which, = self._table([pages])
        self.programs.add(("take", len(which), self._size))
        return programs_of.take(self._model.kernels, self.pool, which)

    def _bring_back(self, row: Row) -> None:
        """Gives a row pages with what its copy on the host has."""
        pages: list[int] = []
        self._reserve([(pages, 0, row.cached)])
        to, = self._table([pages])
        self.programs.add(("put", len(to), self._size))
        self.pool = programs_of.put(self._model.kernels, self.pool, jax.device_put(row.cache, self._device), to)
        row.cache = None
        self._give(row, pages)


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

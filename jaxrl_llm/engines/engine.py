"""Generation that can continue, stop, fork and change weights between chunks: a host loop over the programs of `slots`."""
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.engines import measures
from jaxrl_llm.engines import slots as programs_of
from jaxrl_llm.engines.base import Collects, EngineKind, Wanted, engine
from jaxrl_llm.engines.caches import Prompts, RowCaches
from jaxrl_llm.engines.lanes import Common, Widths, decoding, lane_counts, lanes_of, places_of
from jaxrl_llm.engines.paged_caches import PagedCaches, check_model
from jaxrl_llm.engines.requests import Node, Request, Row, as_ints, check_request, check_size, check_tokens, held
from jaxrl_llm.engines.reserve import Entries, Following, Reserve
from jaxrl_llm.engines.sampler import threefry
from jaxrl_llm.engines.shards import Places, pieces_of, shards
from jaxrl_llm.engines.slots import Drawn, Lanes
from jaxrl_llm.engines.stopping import StopSearch, context
from jaxrl_llm.kernels.products import reads_transposed
from jaxrl_llm.models.transformer import Transformer

__all__ = ["SlotEngine", "Node", "Request", "kind"]
CAN = frozenset({"extend", "fork", "limits", "entropies", "numbers", "stop_texts", "beside", "mesh", "paged"})

_LOOK = 1  # cost of a look at the rows, in decode steps: while others wait, finished rows may idle for that many
_NEVER = np.iinfo(np.int32).max


class _Chunk(NamedTuple):
    """What a chunk decodes.

    places: the slot of each lane.  lanes: what the device knows about the rows there.  common: what these share.
    following: waiting rows that may follow those that end in it; None for none.
    """

    places: list[int]
    lanes: Lanes
    common: Common
    following: Following | None


class _Flight(NamedTuple):
    """A dispatched chunk, its number of steps and the version of its weights; the lanes after it, and its results."""

    chunk: _Chunk
    steps: int
    version: int
    lanes: Lanes
    drawn: Drawn
    entries: Entries | None


class SlotEngine(Collects):
    """Samples trajectories in R row slots, on one device or on the replicas of a mesh.

    A trajectory's tokens depend only on the key, its uid and the weights, not on when, in which slot and beside which rows it
    is sampled: they equal the tokens of `sampler.generate`. Call all methods from one thread.

    Attributes:
      version: policy version of the weights in use.
      programs: the programs compiled so far, one entry for each combination of shapes.
      provides: names of the token columns that it can measure of this model, see `engines.measures`.
    """

    def __init__(self, model: Transformer, params, key: jax.Array, *, slots: int, slot_tokens: int, tokenizer=None,
                 version: int = 0, lora=None, chunks: Sequence[int] = (4, 16), paged: bool = False,
                 columns: Sequence[str] = (), mesh: Mesh | None = None):
        """
        Args:
          model, params, lora: the policy.
          key: the run's key, from which the keys of trajectories are derived.
          slots: R.
          slot_tokens: maximum number of tokens of a trajectory, prompt included.
          tokenizer: for stop texts.
          version: policy version of these weights.
          chunks: numbers of steps between two looks at the rows, ascending: the longest is used unless a shorter one suffices.
          paged: whether caches are pages of a common pool, see `engines.paged_caches`; otherwise each slot has its own.
          columns: names of the further token columns that nodes have, some of those that it `provides`.
          mesh: devices of this process; rows are sharded over `data` x `fsdp` x `seq`, matrices and heads over `tensor`.
            None: one device, the first of those that have the weights.
        Raises:
          ValueError: for numbers that no engine could work with, and lengths that the model does not support.
        """
        if slots < 1:
            raise ValueError(f"slots={slots}; give 1 at least")
        if slot_tokens < 2:
            raise ValueError(f"slot_tokens={slot_tokens}; give 2 at least: a token of the prompt and one of the policy")
        if not chunks or chunks[0] < 1 or any(later <= n for n, later in zip(chunks, chunks[1:])):
            raise ValueError(f"chunks={tuple(chunks)}; give numbers of steps in ascending order, each 1 at least")
        model.check_length(slot_tokens)
        self._model, self._slot_tokens, self._tokenizer, self._chunks = model, slot_tokens, tokenizer, tuple(chunks)
        leaf = jax.tree.leaves(params)[0]
        device = min(leaf.devices(), key=lambda d: d.id) if isinstance(leaf, jax.Array) else jax.local_devices()[0]
        self._shards = shards(device, mesh, slots)
        self._key = self._shards.same(threefry(key))
        cut = pieces_of(mesh, model.config.num_kv_heads) > 1
        self._transposed = not cut and reads_transposed(self._shards.rows, slot_tokens)
        self._lane_counts = lane_counts(self._shards.rows)
        self._rows: dict[int, Row] = {}
        self._queue: deque[Row] = deque()
        self._slots: list[Row | None] = [None] * (self._shards.parts * self._shards.rows)
        self._flights: deque[_Flight] = deque()
        self._changed = False  # whether a row ended that the device still decodes
        self._ended = 0  # rows that ended in the last chunk
        self._entered = 0  # rows that have entered in chunks that follow each other
        self._done: list[Node] = []
        self._widths = Widths()
        self._weights: programs_of.Weights | None = None
        self._given: list[jax.Array | None] = []  # the parameters as given, where they are immutable arrays
        self._policy = jax.eval_shape(lambda: (params, lora))
        self.programs: set[tuple] = set()
        self.provides = measures.provided(model.config)
        self._measures = measures.of(columns, model.config)
        made = PagedCaches if paged else functools.partial(RowCaches, chunk=max(chunks))
        self._caches: RowCaches | PagedCaches = made(model, self._shards, slot_tokens, transposed=self._transposed,
                                                     programs=self.programs, columns=tuple(columns))
        self._decoded = np.zeros(self._shards.parts, np.int64)  # tokens, by shard
        self.publish(version, params, lora)

    @property
    def slot_tokens(self) -> int:
        """Maximum number of tokens of a trajectory, prompt included."""
        return self._slot_tokens

    @property
    def mesh(self) -> Mesh | None:
        """The devices that sample together; None: one device."""
        return self._shards.mesh

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._model.config.vocab_size

    @property
    def prefilled(self) -> int:
        """Number of prompt tokens computed so far."""
        return self._caches.prefilled

    @property
    def computed(self) -> int:
        """Number of tokens that went through the model."""
        return self._caches.read + int(self._decoded.sum())

    @property
    def decoded(self) -> tuple[int, ...]:
        """Number of tokens that each replica has drawn."""
        return tuple(self._decoded.tolist())

    @property
    def running(self) -> tuple[int, ...]:
        """uids of the trajectories that decode, in slot order."""
        return tuple(row.request.uid for row in self._decoding())

    # --- what a caller asks for ---------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queues trajectories: all of them, or none if one is refused.

        Raises ValueError for a request that cannot be met, KeyError for a parent that is not held.
        """
        if any(r.parent is not None for r in requests):
            self._settle()
        rows: dict[int, Row] = {}
        for request in requests:
            if request.uid in self._rows or request.uid in rows:
                raise ValueError(f"uid {request.uid} was submitted before; release it, or give this trajectory its own uid")
            rows[request.uid] = self._root(request) if request.parent is None else self._child(request)
        for row in rows.values():
            self._caches.fork(row)
        self._rows |= rows
        self._queue.extend(rows.values())

    def fork(self, uid: int, uids: Iterable[int]) -> None:
        """Starts trajectories with the new `uids` that continue `uid` from its current token; errors as in `submit`.

        They have the request of `uid`; their random numbers are derived from their own uids.
        """
        request = self._held(uid).request
        self.submit(*(dataclasses.replace(request, uid=new, parent=uid, tokens=(), seed=None, key=None) for new in uids))

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Appends tokens that the policy did not write to a trajectory, which then continues, with a new `limit` if given.

        What the policy wrote before them becomes a node. Raises KeyError for a uid that is not held and ValueError for tokens
        that do not fit; the trajectory then stays unchanged.
        """
        self._settle()
        row = self._held(uid)
        request = row.request if limit is None else dataclasses.replace(row.request, limit=limit)
        check_request(request, self._tokenizer)
        check_tokens(uid, tokens, self.vocab_size)
        check_size(uid, len(row.tokens) + len(tokens), request.limit, row.drawn, self._slot_tokens)
        if row in self._queue:
            self._queue.remove(row)
        if not row.ended and row.measured:
            self._done.append(row.node("extended"))
        row.tokens += as_ints(tokens)
        row.request, row.start, row.measured, row.finish, row.paused = request, len(row.tokens), [], None, False
        row.search = self._search(request, row.tokens)
        self._queue.appendleft(row)

    def pause(self, uid: int) -> Node:
        """Stops decoding a trajectory until `resume`; returns what the policy wrote since its last node.

        Raises KeyError for a uid that is not held, ValueError for one that neither runs nor waits for a slot.
        """
        self._settle()
        row = self._held(uid)
        if row.idle:
            raise ValueError(f"uid {uid} " + ("has ended; extend it" if row.ended else "is paused already"))
        if row in self._queue:
            self._queue.remove(row)
        row.paused = True
        return row.node("paused")

    def resume(self, uid: int) -> None:
        """Continues a paused trajectory. Raises KeyError for a uid that is not held, ValueError for one not paused."""
        row = self._held(uid)
        if not row.paused:
            raise ValueError(f"uid {uid} " + ("has ended; extend it" if row.ended else "is not paused"))
        row.paused = False
        self._queue.appendleft(row)

    def release(self, uid: int) -> None:
        """Forgets a trajectory; a running one is stopped and yields no node. Raises KeyError for a uid that is not held."""
        self._settle()
        row = self._held(uid)
        self._free(row)
        del self._rows[uid]

    def publish(self, version: int, params, lora=None) -> None:
        """Uses other weights from the next chunk on; caches are kept, except those of prompts that no row needs any more.

        If `params` are the same arrays as last time, only the adapters are read again.

        Raises ValueError for weights whose structure, shape or dtype differs from the previous ones.
        """
        self._check_weights((params, lora))
        given = jax.tree.leaves(params)
        known = lora is not None and self._weights is not None and all(
            new is old and isinstance(new, jax.Array) for new, old in zip(given, self._given, strict=True))
        if known:
            self.programs.add(("with_adapters",))
            self._weights = programs_of.with_adapters(self._model, self._weights, self._shards.weights(lora),
                                                      transposed=self._transposed)
        else:
            self.programs.add(("prepare",))
            params, lora = self._shards.weights((params, lora))
            self._weights = programs_of.prepare(self._model, params, lora, transposed=self._transposed)
        self._given = [leaf if isinstance(leaf, jax.Array) else None for leaf in given]
        self.version = version
        self._caches.forget_prefixes()

    def rest(self) -> None:
        """Frees weights and caches until the next `publish`; keeps both while a trajectory is held."""
        if not self._rows:
            self._caches.clear()
            self._weights, self._given = None, []

    def written(self, uid: int, since: int = 0) -> Node:
        """The tokens since a trajectory's last node that reached the host, without the first `since`; decoding continues.

        Raises KeyError for a uid that is not held.
        """
        return self._held(uid).node("running", since)

    def recover(self) -> None:
        """Recovers from an error in `step`: drops all device arrays and reads running trajectories again from their tokens.

        Unless weights changed in between, tokens are the same as without the error: they depend only on the host's state.
        """
        self._flights.clear()
        self._caches.clear()
        self._changed = False
        for row in self._rows.values():
            if row.on_device:
                row.lose_cache()
        for row in [row for row in self._slots if row]:
            self._slots[row.slot], row.slot = None, None
            if not row.idle and row not in self._queue:
                self._queue.appendleft(row)

    def step(self) -> bool:
        """Decodes one chunk; returns whether there was one to decode.

        The next chunk is dispatched before this one is fetched unless a row has to be changed, a row waits that cannot follow
        others within a chunk, or fewer lanes may soon suffice.
        """
        if self._weights is None and self._queue:
            raise ValueError("the engine rests, without weights; publish weights before it samples")
        if not self._flights:
            self._admit()
            if not self._decoding():
                return False
            self._dispatch(self._chunk())
        if (chunk := self._next(self._flights[-1])) is not None:
            self._dispatch(chunk)
        self._harvest()
        return True

    # --- rows ---------------------------------------------------------------------------------------------------------------

    def _held(self, uid: int) -> Row:
        return held(self._rows, uid)

    def _root(self, request: Request) -> Row:
        check_request(request, self._tokenizer)
        check_tokens(request.uid, request.tokens, self.vocab_size)
        tokens = as_ints(request.tokens)
        prompt = tokens[:len(tokens) - request.begun]
        row = Row(request, tokens, self._search(request, prompt), drawn=request.drawn, start=len(tokens),
                  measures=self._measures)
        row.search.feed(tokens[len(prompt):])
        if request.written is not None:
            row.go_on(request.written)
        check_size(request.uid, len(row.tokens), request.limit, row.drawn, self._slot_tokens)
        return row

    def _child(self, request: Request) -> Row:
        """A row that continues its parent's tokens, with what the parent's cache holds now."""
        parent = self._held(request.parent)
        check_request(request, self._tokenizer)
        if len(request.tokens):
            check_tokens(request.uid, request.tokens, self.vocab_size)
        check_size(request.uid, len(parent.tokens) + len(request.tokens), request.limit, parent.drawn, self._slot_tokens)
        tokens = parent.tokens + as_ints(request.tokens)
        if len(request.tokens) or parent.finish in ("stop", "stop_string"):
            search = self._search(request, tokens)
        else:
            search = self._search(request, tokens[:len(tokens) - len(parent.search.tokens)])
            search.feed(parent.search.tokens)
        return Row(request, tokens, search, cached=parent.cached, drawn=parent.drawn, start=len(tokens),
                   source=parent if parent.holds_cache else parent.source, cache=parent.cache, begun=parent.begun,
                   measures=self._measures)

    def _search(self, request: Request, tokens: Sequence[int]) -> StopSearch:
        """A search that begins behind these tokens."""
        before = context(tokens, self._tokenizer) if request.stops_in_context and request.stop_texts else ()
        return StopSearch(request.stop_sequences, request.stop_texts, self._tokenizer, before)

    def _decoding(self) -> list[Row]:
        """The rows that decode, in slot order."""
        return [row for row in decoding(self._slots) if row]

    def _in(self, places: Iterable[int]) -> list[Row | None]:
        """The rows that decode in these slots, None for none."""
        rows = decoding(self._slots)
        return [rows[slot] for slot in places]

    def _free(self, row: Row) -> None:
        """Takes a row out of its slot and out of the queue, and forgets its cache."""
        self._caches.forget(row)
        if row.slot is not None:
            self._slots[row.slot], row.slot = None, None
        if row in self._queue:
            self._queue.remove(row)

    def _check_weights(self, policy) -> None:
        old, new = (dict(jax.tree_util.tree_leaves_with_path(x)) for x in (self._policy, policy))
        other = [path for path in {**old, **new} if path not in old or path not in new
                 or (old[path].shape, old[path].dtype) != (new[path].shape, new[path].dtype)]
        if other:
            path = other[0]
            was, now = (f"{x[path].dtype}{list(x[path].shape)}" if path in x else "absent" for x in (old, new))
            raise ValueError(f"weights of another policy: {jax.tree_util.keystr(path)} was {was} and is {now}; {len(other)} "
                             "arrays differ")

    # --- the device ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Moves waiting rows into free slots, or into those of idle rows, and fills their caches."""
        if self._queue and not any(self._slots):
            self._caches.rest()
        placed = [row for row in self._queue if row.slot is not None]
        for row in placed:
            self._queue.remove(row)
        there = Places(self._shards, self._slots, len(self._queue), self._caches.prefixes)
        for row in [*self._queue]:
            if not there.left:
                break
            if (shard := there.choose(row, self._caches.home(row))) is not None:
                self._seat(row, shard)  # which may fail: until then the row waits
                self._queue.remove(row)
                placed.append(row)
        new = [row for row in placed if not row.cached]
        self._caches.fill(self._weights, placed, self._queue, self._decoding())
        for row in new:
            row.begun = self.version, row.cached

    def _seat(self, row: Row, shard: int) -> None:
        """Gives a row a slot of a shard, the first free one, or that of an idle row."""
        slots = self._shards.slots(shard)
        free = next((slot for slot in slots if self._slots[slot] is None), None)
        if free is None:
            free = next(slot for slot in reversed(slots) if self._slots[slot].idle)
            left = self._slots[free]
            self._caches.leave(left)
            left.slot = None
        self._slots[free], row.slot = row, free

    def _ahead(self) -> int:
        """Steps that are in flight."""
        return sum(flight.steps for flight in self._flights)

    def _most_left(self) -> int:
        """The largest number of tokens that a row may still get after the chunks in flight."""
        return max((row.left for row in self._decoding()), default=0) - self._ahead()

    def _lanes_for(self, ended: int = 0) -> int:
        """Lanes of each shard for the rows that decode, or as many fewer of each."""
        most = max(np.bincount([self._shards.of(row.slot) for row in self._decoding()], minlength=1))
        return min(n for n in self._lane_counts if n >= max(most - ended, 1))

    def _dispatch(self, chunk: _Chunk) -> None:
        """Dispatches a chunk after those in flight."""
        ahead, left = self._ahead(), self._most_left()
        steps = next((n for n in self._chunks if n >= left), self._chunks[-1])
        patience = int(len(chunk.places) // self._shards.parts * _LOOK) if self._queue else _NEVER
        lanes, drawn, entries = self._caches.decode(self._weights, self._in(chunk.places), chunk.lanes, self._key, patience,
                                                    chunk.common, chunk.following, steps=steps, ahead=ahead)
        self._flights.append(_Flight(chunk, steps, self.version, lanes, drawn, entries))

    def _chunk(self) -> _Chunk:
        """The running rows in the smallest number of lanes that holds them, and the waiting ones that may follow them."""
        self._changed, self._entered = False, 0
        places = places_of(self._slots, self._lanes_for(), self._shards.parts)
        rows = self._in(places)
        common = self._caches.common(rows)
        follow = not common.places and any(row.yields for row in rows if row)
        prompts = self._caches.reserve(self._weights, self._queue) if follow else None
        waiting = self._waiting(prompts)
        requests = [row.request for row in (*rows, *waiting) if row]
        self._widths = self._widths.widened(requests)
        # A chunk writes behind what an idle row has cached.
        lengths = [0 if self._slots[slot] is None else self._slots[slot].cached for slot in places]
        own = [slot % self._shards.rows for slot in places]
        lanes = self._shards.by_row(lanes_of(rows, own, lengths, self._widths))
        return _Chunk(places, lanes, common, prompts and self._following(prompts, waiting, np.int32(0)))

    def _next(self, flight: _Flight) -> _Chunk | None:
        """The chunk after those in flight, the last of which is given; None if it depends on how they end."""
        if self._changed or self._most_left() <= 0:
            return None
        chunk = flight.chunk._replace(lanes=flight.lanes, following=None)
        if not self._queue:  # not so if fewer lanes suffice, or will if as many rows end as in the last chunk
            fewer = self._lanes_for(-(-self._ended // self._shards.parts)) * self._shards.parts
            return chunk if len(chunk.places) == fewer else None
        if flight.chunk.following is None:
            return None
        last = flight.chunk.following
        prompts = self._caches.reserve(self._weights, self._queue)
        waiting, rest = self._waiting(prompts), last.rows[self._entered - last.reserve.first:]
        known = waiting[:len(rest)] == rest and all(self._widths.hold(row.request) for row in waiting)
        if not prompts or not known or len(waiting) < min(2 * self._ended, len(self._queue)):
            return None
        return chunk._replace(following=self._following(prompts, waiting, flight.entries.end))

    def _waiting(self, prompts: Prompts | None) -> list[Row]:
        """The first waiting rows, whose prompts are given."""
        return [*itertools.islice(self._queue, len(prompts.rows))] if prompts else []

    def _following(self, prompts: Prompts, waiting: list[Row], entered) -> Following:
        """The waiting rows with these prompts, as the device knows them; `entered` as in `reserve.decode`."""
        none = len(self._slots) - len(waiting)
        lengths = [len(row.tokens) - 1 for row in waiting] + [0] * none
        described = lanes_of(waiting + [None] * none, prompts.rows + [0] * none, lengths, self._widths)
        return Following(waiting, Reserve(prompts.block, described, np.int32(self._entered)), entered)

    def _harvest(self) -> None:
        """Fetches the oldest chunk, ends the rows that ended in it, and begins those that took their lanes."""
        flight = self._flights.popleft()
        drawn, entries = jax.device_get((flight.drawn, flight.entries))
        begun = [0] * len(flight.chunk.places)
        self._ended = 0
        if entries is not None:
            first = flight.chunk.following.reserve.first
            for n in range(entries.begin - first, entries.end - first):
                lane, step = int(entries.lane[n]), int(entries.step[n])
                self._read(flight, drawn, lane, begun[lane], step)
                self._enter(flight.chunk.following.rows[n], lane, flight.version)
                begun[lane] = step
        for lane, begin in enumerate(begun):
            self._read(flight, drawn, lane, begin, flight.steps)
        if not self._decoding():
            self._flights.clear()  # chunks of inert rows

    def _read(self, flight: _Flight, drawn: Drawn, lane: int, begin: int, end: int) -> None:
        """Appends what the row of a lane drew in the steps `begin` to `end` of a chunk."""
        row = self._slots[flight.chunk.places[lane]]
        if row is None or row.idle:  # or it ended at a stop string during this chunk
            return
        if count := int(drawn.mask[begin:end, lane].sum()):
            part = slice(begin, begin + count)
            more = [[*drawn.columns[one.column.name][part, lane]] for one in self._measures]
            self._append(row, [x[part, lane].tolist() for x in (drawn.tokens, drawn.logprobs, drawn.entropies)], flight.version,
                         more)

    def _enter(self, row: Row, slot: int, version: int) -> None:
        """Begins a waiting row, whose prompt a chunk has copied into a slot."""
        self._queue.remove(row)
        self._slots[slot], row.slot = row, slot
        row.cached = len(row.tokens) - 1
        row.begun = version, row.cached
        self._entered += 1

    def _append(self, row: Row, drawn: list[list], version: int, more: list[list]) -> None:
        """Appends new tokens to a row; ends it at a stop token, stop string or its limit."""
        tokens, logprobs, entropies = drawn
        row.tokens += tokens
        row.measured += [(a, b, version, *others) for a, b, *others in zip(logprobs, entropies, *more)]
        row.drawn, row.cached = row.drawn + len(tokens), row.cached + len(tokens)
        self._decoded[self._shards.of(row.slot)] += len(tokens)
        stopped = tokens[-1] in row.request.stop_tokens
        before = len(row.search.tokens)
        kept = row.search.feed(tokens[:-1] if stopped else tokens)
        if kept is None:
            finish = "stop" if stopped else "limit" if row.left <= 0 else None
        else:
            finish, dropped = "stop_string", before + len(tokens) - kept
            self._changed |= not stopped and row.left > 0
            row.drawn -= dropped
            row.cached -= dropped
            del row.tokens[len(row.tokens) - dropped:], row.measured[len(row.measured) - dropped:]
        if finish is not None:
            self._finish(row, finish)

    def _finish(self, row: Row, finish: str) -> None:
        self._done.append(row.node(finish))
        row.finish = finish
        self._ended += 1
        if not row.request.keep:
            del self._rows[row.request.uid]
            self._free(row)

    def _settle(self) -> None:
        """Fetches all that is in flight, so that rows can be changed."""
        while self._flights:
            self._harvest()


@engine(name="slots", provides=tuple(sorted(CAN)))
def kind(run: Wanted) -> EngineKind:
    """The slot engine of a run, with as many slots as this process has rows of a part of a batch."""
    if run.paged:
        check_model(run.model)
    config, mesh = run.model.config, parallel.local_mesh(run.mesh)
    rows = run.prompts * run.group * mesh.size // (run.parts * run.mesh.size)

    def make(params, lora, version: int) -> SlotEngine:
        return SlotEngine(run.model, params, jax.random.key(0), slots=rows,
                      slot_tokens=run.prompt_tokens + run.max_tokens, tokenizer=run.tokenizer, version=version, lora=lora,
                      paged=run.paged, columns=run.columns, mesh=mesh if mesh.size > 1 else None)

    columns = measures.columns_of(run.columns, config)
    return EngineKind("slots", make, CAN, measures.provided(config), columns=columns, mesh=mesh)

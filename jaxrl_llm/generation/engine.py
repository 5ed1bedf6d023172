"""Generation that can go on, stop, fork and change weights at any chunk: a host loop over the programs of `slots`."""
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from jaxrl_llm.generation import slots as programs_of
from jaxrl_llm.generation.sampling import Sampling, check
from jaxrl_llm.generation.slots import Drawn, Lanes, Slots
from jaxrl_llm.generation.stopping import StopSearch
from jaxrl_llm.kernels.products import reads_transposed
from jaxrl_llm.models.transformer import Transformer

RowT = TypeVar("RowT")
_FEWEST = 8  # lanes of a chunk: a step of fewer rows takes as long as reading the weights
_WIDTHS = (16, 64)  # tokens that go into a row at a time


@dataclasses.dataclass(frozen=True)
class Request:
    """A trajectory to sample.

    Attributes:
      uid: its number in the run, from which its random numbers follow.
      limit: most tokens of the policy in it, those of its parent included.
      tokens: the prompt; with a parent, what is put behind the parent's tokens.
      parent: uid of a trajectory that it goes on from, where that one stands now.
      sampling: the distribution to draw from.
      stop_tokens: tokens that end it.  stop_sequences: sequences of tokens.  stop_texts: texts, wherever tokens end.
      keep: it stays when it has ended, to be forked or extended, until it is released.
      seed: number that its random numbers follow from in the place of its uid, 0 to 2^63 - 1; None: the uid.
    """

    uid: int
    limit: int
    tokens: Sequence[int] = ()
    parent: int | None = None
    sampling: Sampling = Sampling()
    stop_tokens: Sequence[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()
    stop_texts: Sequence[str] = ()
    keep: bool = False
    seed: int | None = None

    @property
    def stream(self) -> int:
        """The number that its random numbers follow from."""
        return self.uid if self.seed is None else self.seed


@dataclasses.dataclass(frozen=True)
class Node:
    """A run of tokens that the policy wrote.

    Attributes:
      uid: the trajectory.  parent: the one that it was forked from, or None.
      start: how many tokens of the trajectory come before, prompt and parent's included.
      tokens: `i32[n]`, the stop token or stop string included.
      logprobs, entropies: `f32[n]`, of the distribution that each was drawn from, nats.
      policy_version: `i32[n]`, of the weights that drew it.
      finish: why it ends: "stop" (a stop token), "stop_string" (a sequence or text), "limit", "extended" (tokens of others come
        next) or "paused"; "running" where it goes on, see `Engine.written`.
    """

    uid: int
    parent: int | None
    start: int
    tokens: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    policy_version: np.ndarray
    finish: str


@dataclasses.dataclass(eq=False)
class _Row:
    """A trajectory as the host knows it.

    Attributes:
      tokens: all of it.  cached: how many of them are in its cache, all but the last where it decodes.
      drawn, limit: how many the policy wrote, and may write.
      start: where its node begins.  search: stop strings of the completion, which may have begun before a fork.
      measured: log-prob, entropy and version of each token of the node.
      slot: where it decodes.  cache: a copy of its cache where it does not (None: nothing is cached).
      ended: it waits for `extend`.
    """

    request: Request
    tokens: list[int]
    limit: int
    search: StopSearch
    cached: int = 0
    drawn: int = 0
    start: int = 0
    measured: list[tuple[float, float, int]] = dataclasses.field(default_factory=list)
    slot: int | None = None
    cache: Slots | None = None
    ended: bool = False

    @property
    def left(self) -> int:
        return self.limit - self.drawn

    def node(self, finish: str, since: int = 0) -> Node:
        """What the policy wrote since its last node, without the first `since` tokens of that."""
        start = self.start + since
        logprobs, entropies, versions = np.asarray(self.measured[since:], np.float64).reshape(-1, 3).T
        return Node(self.request.uid, self.request.parent, start, np.asarray(self.tokens[start:], np.int32),
                    logprobs.astype(np.float32), entropies.astype(np.float32), versions.astype(np.int32), finish)


@dataclasses.dataclass
class _Flight:
    """A chunk that was dispatched: its rows (None: an idle lane), steps and version, and what comes of it."""

    rows: list[_Row | None]
    steps: int
    version: int
    lanes: Lanes
    drawn: Drawn


class Engine:
    """Samples trajectories in R row slots, on one device.

    A trajectory's tokens depend on the key, its uid and the weights alone, not on when, where and beside whom it is sampled:
    they are those of `sampler.generate`. Methods are to be called from one thread.

    Attributes:
      version: of the weights in use.
      programs: what was compiled so far, one entry for each combination of shapes.
      prefilled: how many prompt tokens were computed.  computed: how many tokens went through the model, all in all.
    """

    def __init__(self, model: Transformer, params, key: jax.Array, *, slots: int, slot_tokens: int, tokenizer=None,
                 version: int = 0, lora=None, chunks: Sequence[int] = (4, 16)):
        """
        Args:
          model, params, lora: the policy.
          key: the run's key, from which those of trajectories follow.
          slots: R.
          slot_tokens: most tokens of a trajectory, prompt and all.
          tokenizer: for stop texts.
          version: of these weights.
          chunks: steps between two looks at the rows, ascending: the longest, or a shorter one where it is enough for all.
        """
        model.check_length(slot_tokens)
        self._model, self._slot_tokens, self._tokenizer, self._chunks = model, slot_tokens, tokenizer, tuple(chunks)
        leaf = jax.tree.leaves(params)[0]
        self._device = min(leaf.devices(), key=lambda d: d.id) if isinstance(leaf, jax.Array) else jax.local_devices()[0]
        self._key = jax.device_put(key, self._device)
        self._transposed = reads_transposed(slots, slot_tokens)
        self._rooms = rooms(slot_tokens + max(*chunks, _WIDTHS[-1]))
        self._lane_counts = lane_counts(slots)
        self._rows: dict[int, _Row] = {}
        self._queue: deque[_Row] = deque()
        self._slots: list[_Row | None] = [None] * slots
        self._flights: deque[_Flight] = deque()
        self._changed = False  # a row ended that the device goes on with
        self._done: list[Node] = []
        self._cache: Slots | None = None
        self._prefixes: OrderedDict[tuple[int, ...], Slots] = OrderedDict()
        self._stop_width = 4
        self._weights: programs_of.Weights | None = None
        self._given: list[jax.Array | None] = []  # the parameters as they came, where they are arrays that cannot change
        self._policy = jax.eval_shape(lambda: (params, lora))
        self.programs: set[tuple] = set()
        self.prefilled, self.computed = 0, 0
        self.publish(version, params, lora)

    @property
    def slot_tokens(self) -> int:
        """Most tokens of a trajectory, prompt and all."""
        return self._slot_tokens

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._model.config.vocab_size

    @property
    def running(self) -> tuple[int, ...]:
        """uids of the trajectories in slots, in the order of these."""
        return tuple(row.request.uid for row in self._slots if row)

    # --- what a caller asks for ---------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queues trajectories; where one is refused, none is taken.

        Raises ValueError for a request that cannot be met, KeyError for a parent that is not held.
        """
        if any(r.parent is not None for r in requests):
            self._settle()
        rows: dict[int, _Row] = {}
        for request in requests:
            if request.uid in self._rows or request.uid in rows:
                raise ValueError(f"uid {request.uid} was submitted before; release it, or give this trajectory its own uid")
            rows[request.uid] = self._root(request) if request.parent is None else self._child(request)
        self._rows |= rows
        self._queue.extend(rows.values())

    def fork(self, uid: int, uids: Iterable[int]) -> None:
        """Trajectories of the new `uids` that go on from where `uid` stands, with its request; errors as in `submit`.

        Their random numbers follow from their own uids.
        """
        request = self._held(uid).request
        self.submit(*(dataclasses.replace(request, uid=new, parent=uid, tokens=(), seed=None) for new in uids))

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Puts tokens of others behind a trajectory, which then goes on, with another `limit` if one is given.

        What the policy wrote before becomes a node. Raises KeyError for a uid that is not held and ValueError for tokens that
        do not fit; the trajectory is then as it was.
        """
        self._settle()
        row = self._held(uid)
        limit = row.limit if limit is None else limit
        self._check_tokens(uid, tokens)
        self._check_size(uid, len(row.tokens) + len(tokens), limit, row.drawn)
        self._take_out(row)
        if not row.ended and row.measured:
            self._done.append(row.node("extended"))
        row.tokens += [int(t) for t in tokens]
        row.limit, row.start, row.measured, row.ended = limit, len(row.tokens), [], False
        row.search = self._search(row.request)
        self._queue.appendleft(row)

    def pause(self, uid: int) -> Node:
        """Takes a trajectory out until `resume`; returns what it wrote since its last node.

        Raises KeyError for a uid that is not held, ValueError for one that neither runs nor waits for a slot.
        """
        self._settle()
        row = self._held(uid)
        if not self._active(row):
            raise ValueError(f"uid {uid} " + ("has ended; extend it" if row.ended else "is paused already"))
        self._take_out(row)
        return row.node("paused")

    def resume(self, uid: int) -> None:
        """Goes on with a paused trajectory. Raises KeyError for a uid that is not held, ValueError for one not paused."""
        row = self._held(uid)
        if self._active(row) or row.ended:
            raise ValueError(f"uid {uid} " + ("has ended; extend it" if row.ended else "is not paused"))
        self._queue.appendleft(row)

    def release(self, uid: int) -> None:
        """Forgets a trajectory; one that runs is stopped and makes no node. Raises KeyError for a uid that is not held."""
        self._settle()
        row = self._held(uid)
        self._free(row)
        del self._rows[uid]

    def publish(self, version: int, params, lora=None) -> None:
        """Other weights from the next chunk on; caches are kept, those of prompts nobody reads any more are not.

        Where `params` are the arrays of last time, the adapters alone are read again.

        Raises ValueError for weights of another structure, shape or dtype than those before.
        """
        self._check_weights((params, lora))
        given = jax.tree.leaves(params)
        known = lora is not None and self._weights is not None and all(
            new is old and isinstance(new, jax.Array) for new, old in zip(given, self._given, strict=True))
        params, lora = jax.device_put((params, lora), self._device)
        if known:
            self._count("with_adapters")
            self._weights = programs_of.with_adapters(self._model, self._weights, lora, transposed=self._transposed)
        else:
            self._count("prepare")
            self._weights = programs_of.prepare(self._model, params, lora, transposed=self._transposed)
        self._given = [leaf if isinstance(leaf, jax.Array) else None for leaf in given]
        self.version = version
        self._prefixes.clear()

    def collect(self) -> list[Node]:
        """Goes on until a node is finished and returns all that are; an empty list where nothing runs or waits."""
        while not self._done and self.step():
            pass
        return self.finished()

    def finished(self) -> list[Node]:
        """The nodes that are finished and were not returned before, without going on."""
        found, self._done = self._done, []
        return found

    def written(self, uid: int, since: int = 0) -> Node:
        """What the host knows of a trajectory since its last node, without its first `since` tokens; it goes on undisturbed.

        Raises KeyError for a uid that is not held.
        """
        return self._held(uid).node("running", since)

    def recover(self) -> None:
        """After an error in `step`: all that lay on the device is given up, and what ran is read again from its tokens.

        Without new weights in between tokens stay as they would have been, as they follow from what the host holds.
        """
        self._flights.clear()
        self._prefixes.clear()
        self._cache, self._changed = None, False
        for row in [row for row in self._slots if row]:
            self._slots[row.slot], row.slot, row.cached, row.cache = None, None, 0, None
            self._queue.appendleft(row)

    def step(self) -> bool:
        """Goes on for a chunk; whether there was one to decode.

        The next chunk is dispatched before this one is fetched unless a row waits for a slot or has to be changed, or fewer
        lanes would do.
        """
        if not self._flights:
            self._admit()
            if not any(self._slots):
                return False
            self._dispatch()
        if self._runs_ahead():
            self._dispatch()
        self._harvest()
        return True

    # --- rows ---------------------------------------------------------------------------------------------------------------

    def _held(self, uid: int) -> _Row:
        return held(self._rows, uid)

    def _root(self, request: Request) -> _Row:
        self._check_request(request)
        self._check_tokens(request.uid, request.tokens)
        self._check_size(request.uid, len(request.tokens), request.limit, 0)
        tokens = [int(t) for t in request.tokens]
        return _Row(request, tokens, request.limit, self._search(request), start=len(tokens))

    def _child(self, request: Request) -> _Row:
        """A row that goes on from its parent's tokens, with a copy of the parent's cache."""
        parent = self._held(request.parent)
        self._check_request(request)
        if len(request.tokens):
            self._check_tokens(request.uid, request.tokens)
        self._check_size(request.uid, len(parent.tokens) + len(request.tokens), request.limit, parent.drawn)
        tokens = parent.tokens + [int(t) for t in request.tokens]
        search = self._search(request)
        if not len(request.tokens) and not parent.ended:
            search.feed(parent.search.tokens)
        if parent.slot is not None and parent.cache is None:
            parent.cache = self._copy(parent)  # shared by all forks until the parent goes on
        return _Row(request, tokens, request.limit, search, cached=parent.cached, drawn=parent.drawn, start=len(tokens),
                    cache=parent.cache)

    def _search(self, request: Request) -> StopSearch:
        return StopSearch(request.stop_sequences, request.stop_texts, self._tokenizer)

    def _active(self, row: _Row) -> bool:
        return row.slot is not None or row in self._queue

    def _free(self, row: _Row) -> None:
        """Neither runs nor waits."""
        if row.slot is not None:
            self._slots[row.slot], row.slot = None, None
        elif row in self._queue:
            self._queue.remove(row)

    def _take_out(self, row: _Row) -> None:
        if row.slot is not None:
            row.cache = self._copy(row)
        self._free(row)

    def _copy(self, row: _Row) -> Slots:
        """The cache of a running row, on the host."""
        return jax.device_get(self._taken(row.slot, row.cached))

    # --- checks -------------------------------------------------------------------------------------------------------------

    def _check_request(self, request: Request) -> None:
        check(request.sampling)
        if not 0 <= request.stream < 2**63:
            raise ValueError(f"uid {request.uid} has the number {request.stream} for its draws; give one from 0 to 2^63 - 1")
        if request.stop_texts and self._tokenizer is None:
            raise ValueError(f"uid {request.uid} has stop texts, but the engine has no tokenizer to find them with")
        if not all(request.stop_texts) or not all(len(s) for s in request.stop_sequences):
            raise ValueError(f"uid {request.uid} has an empty stop string")

    def _check_tokens(self, uid: int, tokens: Sequence[int]) -> None:
        vocab = self._model.config.vocab_size
        if not len(tokens):
            raise ValueError(f"uid {uid} was given no tokens; one at least is needed")
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise ValueError(f"uid {uid} was given a token outside the vocabulary, 0 to {vocab - 1}")

    def _check_size(self, uid: int, length: int, limit: int, drawn: int) -> None:
        if limit <= drawn:
            raise ValueError(f"uid {uid} has a limit of {limit} tokens of the policy, {drawn} of which are there already; "
                             "give it a higher limit")
        if length + limit - drawn > self._slot_tokens:
            raise ValueError(f"uid {uid} may get {length} + {limit - drawn} tokens, a slot holds {self._slot_tokens}; lower "
                             f"its limit to {max(self._slot_tokens - length, 0) + drawn}, shorten its prompt, or make the "
                             "engine with a larger slot_tokens")

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

    def _count(self, *program) -> None:
        self.programs.add(program)

    def _taken(self, slot: int, length: int) -> Slots:
        room = next(room for room in self._rooms if room >= length)
        self._count("take", self._cache.room, room)
        return programs_of.take(self._cache, np.int32(slot), room=room)

    def _make_room(self, length: int) -> None:
        """Caches of `length` places at least."""
        room = next(room for room in self._rooms if room >= length)
        if self._cache is None:
            self._cache = jax.device_put(programs_of.empty(self._model, len(self._slots), room), self._device)
        elif room > self._cache.room:
            self._count("lengthen", self._cache.room, room)
            self._cache = programs_of.lengthen(self._cache, room=room)

    def _admit(self) -> None:
        """Rows that wait into free slots, with what they have read before in their caches."""
        if self._queue and not any(self._slots):
            self._cache = None  # nothing is in it: short caches will do again
        placed = []
        while self._queue and None in self._slots:
            row = self._queue.popleft()
            row.slot = self._slots.index(None)
            self._slots[row.slot] = row
            placed.append(row)
        if not placed:
            return
        self._make_room(max(len(row.tokens) for row in placed))
        prompts: dict[tuple[int, ...], list[_Row]] = {}
        copies: dict[int, tuple[Slots, list[_Row]]] = {}
        for row in placed:
            if row.cache is not None:
                copies.setdefault(id(row.cache), (row.cache, []))[1].append(row)
            elif len(row.tokens) > 1:
                prompts.setdefault(tuple(row.tokens[:-1]), []).append(row)
        for cache, rows in copies.values():
            self._put(cache, rows)
        first = [rows[0] for prompt, rows in prompts.items() if prompt not in self._prefixes]
        self.prefilled += sum(len(row.tokens) - 1 for row in first)
        self._feed([row for _, rows in copies.values() for row in rows] + first)
        for prompt, rows in prompts.items():
            self._share(prompt, rows)
        while len(self._prefixes) > len(self._slots):  # only now, as one of the oldest may just have been read again
            self._prefixes.popitem(last=False)
        for row in placed:
            row.cache = None

    def _share(self, prompt: tuple[int, ...], rows: list[_Row]) -> None:
        """The cache of a prompt for all rows that begin with it; it is kept for others to come, as many as there are slots."""
        if prompt not in self._prefixes:
            leader, *rows = rows
            self._prefixes[prompt] = self._taken(leader.slot, len(prompt))
        self._prefixes.move_to_end(prompt)
        for row in rows:
            row.cached = len(prompt)
        self._put(self._prefixes[prompt], rows)

    def _put(self, cache: Slots, rows: list[_Row]) -> None:
        """A copy of a cache into the slots of these rows."""
        self._make_room(cache.room)
        while rows:
            part, rows = rows[:_FEWEST], rows[_FEWEST:]
            places = _padded([row.slot for row in part], len(self._slots), 1 if len(part) == 1 else _FEWEST)
            self._count("put", len(places), cache.room, self._cache.room)
            self._cache = programs_of.put(self._cache, jax.device_put(cache, self._device), places)

    def _feed(self, rows: list[_Row]) -> None:
        """What these rows have to read, all but their last tokens, into their caches: some of each at a time."""
        while rows := [row for row in rows if row.cached < len(row.tokens) - 1]:
            part = rows[:_FEWEST]
            longest = max(len(row.tokens) - 1 - row.cached for row in part)
            width = next((w for w in _WIDTHS if w >= longest), _WIDTHS[-1])
            lanes = 1 if len(part) == 1 else _FEWEST
            tokens = np.zeros((lanes, width), np.int32)
            for line, row in zip(tokens, part):
                read = row.tokens[row.cached:len(row.tokens) - 1][:width]
                line[:len(read)] = read
            self._make_room(max(row.cached for row in part) + width)
            slot = _padded([row.slot for row in part], len(self._slots), lanes)
            length = _padded([row.cached for row in part], 0, lanes)
            self._count("extend", lanes, width, self._cache.room)
            self._cache = programs_of.extend(self._model, self._weights, self._cache, slot, length, tokens,
                                             transposed=self._transposed)
            for row in part:
                before, row.cached = row.cached, min(row.cached + width, len(row.tokens) - 1)
                self.computed += row.cached - before

    def _ahead(self) -> int:
        """Steps that are in flight."""
        return sum(flight.steps for flight in self._flights)

    def _most_left(self) -> int:
        """Most tokens that a row may get after all that is in flight."""
        return max((row.left for row in self._slots if row), default=0) - self._ahead()

    def _runs_ahead(self) -> bool:
        """Whether another chunk may follow those in flight before it is known how they end."""
        lanes = self._lanes_for(sum(row is not None for row in self._slots))
        return (not self._queue and not self._changed and self._most_left() > 0 and len(self._flights[-1].rows) == lanes)

    def _lanes_for(self, rows: int) -> int:
        return min(n for n in self._lane_counts if n >= rows)

    def _dispatch(self) -> None:
        """One more chunk, after those in flight."""
        rows, ahead, left = [row for row in self._slots if row], self._ahead(), self._most_left()
        steps = next((n for n in self._chunks if n >= left), self._chunks[-1])
        self._make_room(max(row.cached + min(ahead, row.left) for row in rows) + steps)
        if self._flights:
            owners, lanes = self._flights[-1].rows, self._flights[-1].lanes
        else:
            owners, lanes = self._lanes(rows)
            self._changed = False
        restricted = lanes.sampling.top_k is not None
        self._count("decode", len(owners), steps, self._cache.room, restricted, lanes.stops.shape[1])
        self._cache, lanes, drawn = programs_of.decode(self._model, self._weights, self._cache, lanes, self._key, steps=steps,
                                                       transposed=self._transposed)
        self._flights.append(_Flight(owners, steps, self.version, lanes, drawn))

    def _lanes(self, rows: list[_Row]) -> tuple[list[_Row | None], Lanes]:
        """The running rows in the smallest number of lanes that holds them; idle slots fill it up."""
        count = self._lanes_for(len(rows))
        idle = [slot for slot, row in enumerate(self._slots) if row is None]
        places = sorted([row.slot for row in rows] + idle[:count - len(rows)])
        owners = [self._slots[slot] for slot in places]
        while self._stop_width < max(len(row.request.stop_tokens) for row in rows):
            self._stop_width *= 2
        stops = np.full((count, self._stop_width), -1, np.int32)
        numbers = np.zeros((count, 5), np.int64)
        for i, row in enumerate(owners):
            if row is not None:
                stops[i, :len(row.request.stop_tokens)] = row.request.stop_tokens
                numbers[i] = row.request.stream, row.cached, row.tokens[-1], row.drawn, row.left
        uid, length, pending, drawn, left = numbers.T
        halves = np.stack([uid >> 32, uid & 0xFFFFFFFF], axis=1).astype(np.uint32)
        length, pending, drawn, left = (x.astype(np.int32) for x in (length, pending, drawn, left))
        alive = np.array([row is not None for row in owners])
        sampling = _stacked([Sampling() if row is None else row.request.sampling for row in owners])
        lanes = Lanes(np.asarray(places, np.int32), halves, length, pending, drawn, left, alive, stops, sampling)
        return owners, jax.device_put(lanes, self._device)

    def _harvest(self) -> None:
        """Fetches the oldest chunk and ends the rows that ended in it."""
        flight = self._flights.popleft()
        found = jax.device_get(flight.drawn)
        for lane, row in enumerate(flight.rows):
            if row is not None and row.slot is not None:  # or it ended at a stop string while this chunk ran
                count = int(found.mask[:, lane].sum())
                self._append(row, [x[:count, lane].tolist() for x in (found.tokens, found.logprobs, found.entropies)],
                             flight.version)
        if not any(self._slots):
            self._flights.clear()  # chunks of inert rows

    def _append(self, row: _Row, drawn: list[list], version: int) -> None:
        """New tokens of a row; ends it at a stop token, stop string or its limit."""
        tokens, logprobs, entropies = drawn
        row.tokens += tokens
        row.measured += [(a, b, version) for a, b in zip(logprobs, entropies)]
        row.drawn, row.cached, row.cache = row.drawn + len(tokens), row.cached + len(tokens), None
        self.computed += len(tokens)
        stopped = tokens[-1] in row.request.stop_tokens
        before = len(row.search.tokens)
        kept = row.search.feed(tokens[:-1] if stopped else tokens)
        if kept is None:
            finish = "stop" if stopped else "limit" if row.left == 0 else None
        else:
            finish, dropped = "stop_string", before + len(tokens) - kept
            self._changed |= not stopped and row.left > 0
            row.drawn -= dropped
            row.cached -= dropped
            del row.tokens[len(row.tokens) - dropped:], row.measured[len(row.measured) - dropped:]
        if finish is not None:
            self._finish(row, finish)

    def _finish(self, row: _Row, finish: str) -> None:
        self._done.append(row.node(finish))
        if row.request.keep:
            row.ended = True
            self._take_out(row)
        else:
            self._free(row)
            del self._rows[row.request.uid]

    def _settle(self) -> None:
        """Fetches all that is in flight, so that rows can be changed."""
        while self._flights:
            self._harvest()


def held(rows: Mapping[int, RowT], uid: int) -> RowT:
    """The row of a trajectory that an engine still holds; KeyError for any other."""
    if uid not in rows:
        raise KeyError(f"uid {uid} is not held: it was never submitted, or was released, or ended and its request did not "
                       "say keep=True")
    return rows[uid]


def rooms(most: int) -> tuple[int, ...]:
    """Lengths of caches, the last of them of `most` places at least: up to four multiples of 32, as `sampler.stages`."""
    count = min(4, -(-most // 32))
    return tuple(-(-most * k // (count * 32)) * 32 for k in range(1, count + 1))


def lane_counts(rows: int) -> tuple[int, ...]:
    """How many rows a chunk may have: all, half or a quarter of them, where these are `_FEWEST` at least."""
    return tuple(n for n in dict.fromkeys((rows, -(-rows // 2), -(-rows // 4))) if n == rows or n >= _FEWEST)


def _padded(values: Sequence[int], fill: int, count: int) -> np.ndarray:
    """i32[count]"""
    return np.asarray([*values, *[fill] * (count - len(values))], np.int32)


def _stacked(samplings: Sequence[Sampling]) -> Sampling:
    """One distribution for each row, arrays `[m]`. Where nobody restricts the vocabulary, nothing is sorted."""
    def column(name, off, dtype):
        values = [getattr(s, name) for s in samplings]
        return np.asarray([off if value is None else value for value in values], dtype)
    temperature = column("temperature", 1.0, np.float32)
    if all(s.top_k is None and s.top_p is None and s.min_p is None for s in samplings):
        return Sampling(temperature)
    return Sampling(temperature, column("top_k", np.iinfo(np.int32).max, np.int32), column("top_p", np.inf, np.float32),
                    column("min_p", 0.0, np.float32))

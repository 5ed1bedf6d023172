"""The scan sampler behind the contract of an engine: whole batches of single turns in one compiled program."""
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.data.ladders import prompt_buckets, smallest
from jaxrl_llm.engines import measures
from jaxrl_llm.engines.base import Collects, EngineKind, Wanted, engine
from jaxrl_llm.engines.prompts import pad
from jaxrl_llm.engines.requests import Node, Request, check_tokens
from jaxrl_llm.engines.sampler import Completions, generate
from jaxrl_llm.tools.guard import Guarded

CAN = frozenset({"spread", "limits", "entropies", "mesh"})


class _Flight(NamedTuple):
    """A dispatched part of a batch: the requests of each row, the version of its weights, and its results."""

    rows: list[list[Request]]
    version: int
    made: Completions


class ScanEngine(Collects):
    """Samples `prompts` x `group` completions at a time in `parts`, over all devices of a mesh; see `sampler.generate`.

    Up to `group` requests with the same tokens and one limit, submitted one after another, share a row of the batch, where the
    tokens are read once. What is missing of a row or of the batch is padded, since a compiled program has one shape. The next
    part is dispatched before one is returned, and not before it is finished: the device would have to hold the rows of both.

    Attributes:
      version: policy version of the weights in use.
    """

    computed = 0
    decoded = ()

    def __init__(self, program: Callable[..., Completions], params: Any, lora: Any = None, version: int = 0, *, prompts: int,
                 group: int, parts: int, prompt_tokens: int, max_tokens: int, mesh: Mesh, vocab: int):
        """
        Args:
          program: `(params, prompt_tokens, prompt_mask, keys, sampling, lora=, limits=, drawn=) -> Completions`.
          prompt_tokens, max_tokens: maximum tokens of a prompt, and T.
          vocab: V.
        """
        self._program, self._mesh, self._vocab = program, mesh, vocab
        self._lengths = lengths(prompt_tokens, max_tokens)
        self._prompts, self._group, self._size = prompts, group, prompts // parts
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        self._queue: deque[list[Request]] = deque()  # rows
        self._parts: deque[tuple[list[list[Request]], tuple]] = deque()
        self._flight: _Flight | None = None
        self._released = set[int]()
        self._done: list[Node] = []
        self.publish(version, params, lora)

    def publish(self, version: int, params: Any, lora: Any = None) -> None:
        """Samples with these weights from the next part on."""
        self.version, self._weights = version, (params, lora)

    def rest(self) -> None:
        """Frees the weights until the next `publish`."""
        self._weights = None, None

    def submit(self, *requests: Request) -> None:
        """Queues requests; ValueError for prompts that are too long, and limits beyond T."""
        for one in requests:
            check_tokens(one.uid, one.tokens, self._vocab)
            length = len(one.tokens) - one.drawn
            if length > self._prompt_tokens or not 1 <= one.limit <= self._max_tokens:
                raise ValueError(f"uid {one.uid} has a prompt of {length} tokens and a limit of {one.limit}; the sampler is "
                                 f"made for {self._prompt_tokens} and {self._max_tokens}")
            if one.drawn >= one.limit:
                raise ValueError(f"uid {one.uid} begins with {one.drawn} tokens, its limit is {one.limit}; give fewer, or a "
                                 "higher limit")
        self._queue.extend(rows_of(requests, self._group))

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Raises NotImplementedError: completions of a compiled batch have one turn."""
        raise NotImplementedError("the scan sampler's completions have one turn; take the slot engine for more")

    def release(self, uid: int) -> None:
        """Takes a request back: one that is sampled already makes no node. Raises KeyError for one that is unknown."""
        flown = [] if self._flight is None else self._flight.rows
        if any(one.uid == uid for row in (*flown, *(row for part, _ in self._parts for row in part)) for one in row):
            self._released.add(uid)
            return
        row = next((row for row in self._queue if any(one.uid == uid for one in row)), None)
        if row is None:
            raise KeyError(f"uid {uid} is not held: it was never submitted, or has ended")
        row[:] = [one for one in row if one.uid != uid]
        if not row:
            self._queue.remove(row)

    def written(self, uid: int) -> None:
        """None: nothing of a completion is known before its part of the batch has ended."""

    def step(self) -> bool:
        """Samples the next part; returns whether there was one."""
        if self._flight is None:
            self._flight = self._begun()
        if (flight := self._flight) is None:
            return False
        made, self._flight = parallel.fetch(flight.made), None
        try:
            self._flight = self._begun()
        finally:
            nodes = _nodes(flight, made)
            self._done += [node for node in nodes if node.uid not in self._released]
            self._released -= {node.uid for node in nodes}
        return True

    def _begun(self) -> _Flight | None:
        """The next part, dispatched; None if nothing is queued."""
        if not self._parts:
            self._prepare()
        if not self._parts:
            return None
        requests, (tokens, mask, keys, own) = self._parts[0]
        params, lora = self._weights
        if params is None:
            raise ValueError("the engine rests, without weights; publish weights before it samples")
        keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
        rows, own = parallel.put(((tokens, mask, keys), own), parallel.batch_sharding(self._mesh))
        flight = _Flight(requests, self.version, self._program(params, *rows, requests[0][0].sampling, lora=lora, **own))
        self._parts.popleft()
        return flight

    def _prepare(self) -> None:
        """Cuts the next batch into parts; its prompts are padded to one of a few lengths."""
        first = next(iter(self._queue), None)
        if first is None:
            return
        rows = itertools.islice(self._queue, self._prompts)
        batch = list(itertools.takewhile(lambda row: row[0].sampling is first[0].sampling, rows))
        for _ in batch:
            self._queue.popleft()
        arrays = self._arrays(batch)
        for start in range(0, len(batch), self._size):
            place = slice(start, start + self._size)
            self._parts.append((batch[place], jax.tree.map(lambda x: x[place], arrays)))

    def _arrays(self, batch: list[list[Request]]) -> tuple:
        """`(prompt tokens, prompt mask, words of keys, limits and drawn tokens by name)` of a batch, [P, ...] each."""
        P, G = self._prompts, self._group
        prompts = [list(row[0].tokens) for row in batch]
        missing = P - len(prompts)
        length = smallest(self._lengths, max(map(len, prompts)))
        padded = pad(prompts + [prompts[0]] * missing, [0] * P, length)
        keys = np.zeros((P, G, 2), np.uint32)
        for p, row in enumerate(batch):
            keys[p, :len(row)] = [one.key for one in row]
        drawn = np.array([row[0].drawn for row in batch] + [0] * missing, np.int32)
        limits = np.array([row[0].limit for row in batch] + [1] * missing, np.int32) - drawn
        return padded.tokens, padded.mask, keys, {"limits": limits, "drawn": drawn}


def rows_of(requests: Sequence[Request], group: int) -> list[list[Request]]:
    """The requests in rows of at most `group`, which share tokens, limit and distribution."""
    rows = list[list[Request]]()
    for one in requests:
        last = rows[-1] if rows else []
        if 0 < len(last) < group and (last[0].tokens, last[0].drawn, last[0].limit) == (
                one.tokens, one.drawn, one.limit) and (
                last[0].sampling is one.sampling):
            last.append(one)
        else:
            rows.append([one])
    return rows


def _nodes(flight: _Flight, made: Completions) -> list[Node]:
    """The completions of a part as nodes, without those that pad it."""
    lengths, nodes = np.asarray(made.mask).sum(-1), list[Node]()
    for p, row in enumerate(flight.rows):
        for g, one in enumerate(row):
            n = int(lengths[p, g])
            tokens, logprobs, entropies, *more = (np.asarray(x[p, g, :n]) for x in (
                made.tokens, made.logprobs, made.entropies, *made.columns.values()))
            nodes.append(Node(one.uid, None, len(one.tokens), tokens, logprobs, entropies,
                              np.full(n, flight.version, np.int32), "stop" if made.stopped[p, g] else "limit",
                              dict(zip(made.columns, more))))
    return nodes


def lengths(prompt_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """To how many tokens prompts are padded; those with tokens of a completion behind them, from the longest prompt on."""
    return (*prompt_buckets(prompt_tokens), *(prompt_tokens + more for more in prompt_buckets(max_tokens)))


def program_of(run: Wanted) -> Guarded:
    """The compiled sampler of a run."""
    compiled = functools.partial(generate, run.model, max_tokens=run.max_tokens, stop_ids=run.stop_ids, mesh=run.mesh,
                                 columns=run.columns)
    return Guarded("rollout", compiled, run.programs * len(lengths(run.prompt_tokens, run.max_tokens)))


@engine(name="scan", provides=tuple(sorted(CAN)))
def kind(run: Wanted, program: Guarded | None = None) -> EngineKind:
    """The scan sampler of a run, by its `program` if one is there already; ValueError for rows that its model cannot read."""
    run.model.check_length(run.prompt_tokens + run.max_tokens)
    program = program or program_of(run)

    def make(params: Any, lora: Any, version: int) -> ScanEngine:
        return ScanEngine(program, params, lora, version, prompts=run.prompts, group=run.group, parts=run.parts,
                          prompt_tokens=run.prompt_tokens, max_tokens=run.max_tokens, mesh=run.mesh,
                          vocab=run.model.config.vocab_size)

    config = run.model.config
    return EngineKind("scan", make, CAN, measures.provided(config), columns=measures.columns_of(run.columns, config))

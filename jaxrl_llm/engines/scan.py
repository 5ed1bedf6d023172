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
from jaxrl_llm.engines.base import CAN as CAN_TEXTS
from jaxrl_llm.engines.base import Collects, EngineKind, Wanted, engine
from jaxrl_llm.engines.prompts import pad
from jaxrl_llm.engines.requests import Node, Request, check_tokens
from jaxrl_llm.engines.sampler import Completions, Forced, generate
from jaxrl_llm.tools.guard import Guarded

CAN = frozenset({"forced", "spread", "limits", "entropies", "mesh"})


class _Flight(NamedTuple):
    """A dispatched part of a batch: its requests, the version of its weights, and its results."""

    requests: list[Request]
    version: int
    made: Completions


class ScanEngine(Collects):
    """Samples `prompts` x `group` completions at a time in `parts`, over all devices of a mesh; see `sampler.generate`.

    Requests come in groups: `group` of them with one prompt, one after another, of one distribution. What is missing of a batch
    is padded, since a compiled program has one shape. The next part is dispatched before one is returned, and not before it is
    finished: the device would have to hold the rows of both.

    Attributes:
      version: policy version of the weights in use.
    """

    computed = 0
    decoded = ()

    def __init__(self, program: Callable[..., Completions], params: Any, lora: Any = None, version: int = 0, *, prompts: int,
                 group: int, parts: int, prompt_tokens: int, max_tokens: int, mesh: Mesh, vocab: int,
                 wants: frozenset[str] = frozenset()):
        """
        Args:
          program: `(params, prompt_tokens, prompt_mask, keys, sampling, lora=) -> Completions`, also with `forced=` and
            `limits=` where `wants` names them: one program then serves all batches.
          prompt_tokens, max_tokens: maximum tokens of a prompt, and T.
          vocab: V.
        """
        self._program, self._mesh, self._vocab, self._wants = program, mesh, vocab, wants
        self._prompts, self._group, self._size = prompts, group, prompts // parts
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        self._queue: deque[Request] = deque()
        self._parts: deque[tuple[list[Request], tuple]] = deque()
        self._flight: _Flight | None = None
        self._done: list[Node] = []
        self.publish(version, params, lora)

    def publish(self, version: int, params: Any, lora: Any = None) -> None:
        """Samples with these weights from the next part on."""
        self.version, self._weights = version, (params, lora)

    def rest(self) -> None:
        """Frees the weights until the next `publish`."""
        self._weights = None, None

    def submit(self, *requests: Request) -> None:
        """Queues whole groups; ValueError for prompts that are too long, limits beyond T, and groups that are not whole."""
        for first in range(0, len(requests), self._group):
            group = requests[first:first + self._group]
            check_tokens(group[0].uid, group[0].tokens, self._vocab)
            alike = all(one.tokens == group[0].tokens and one.limit == group[0].limit for one in group)
            if len(group) < self._group or not alike:
                raise ValueError(f"uid {group[0].uid} begins a group of {len(group)} requests; the scan sampler takes "
                                 f"{self._group} with one prompt and one limit, one after another")
            if len(group[0].tokens) > self._prompt_tokens or not 1 <= group[0].limit <= self._max_tokens:
                raise ValueError(f"uid {group[0].uid} has a prompt of {len(group[0].tokens)} tokens and a limit of "
                                 f"{group[0].limit}; the sampler is made for {self._prompt_tokens} and {self._max_tokens}")
            self._check_wants(group)
        self._queue.extend(requests)

    def _check_wants(self, group: Sequence[Request]) -> None:
        """Raises ValueError for what the program was not made for, and would not heed."""
        most = group[0].sampling.max_tokens
        needs = {"forced": any(len(one.forced) for one in group),
                 "limits": group[0].limit < (self._max_tokens if most is None else min(most, self._max_tokens))}
        if missing := [what for what, needed in needs.items() if needed and what not in self._wants]:
            raise ValueError(f"uid {group[0].uid} needs an engine that {CAN_TEXTS[missing[0]]}, and this one is made without; "
                             f"make it with wants={{{missing[0]!r}}}, or take the slot engine")

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Raises NotImplementedError: completions of a compiled batch have one turn."""
        raise NotImplementedError("the scan sampler's completions have one turn; take the slot engine for more")

    def release(self, uid: int) -> None:
        """Takes a queued request back; raises KeyError for one that is sampled or unknown."""
        known = [one for one in self._queue if one.uid == uid]
        if not known:
            raise KeyError(f"uid {uid} is not queued: it was never submitted, or its batch is sampled")
        self._queue.remove(known[0])

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
            self._done += _nodes(flight, made)
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
        flight = _Flight(requests, self.version, self._program(params, *rows, requests[0].sampling, lora=lora, **own))
        self._parts.popleft()
        return flight

    def _prepare(self) -> None:
        """Cuts the next batch into parts; its prompts are padded to one of a few lengths."""
        first = next(iter(self._queue), None)
        if first is None:
            return
        most = self._prompts * self._group
        batch = list(itertools.takewhile(lambda one: one.sampling is first.sampling, itertools.islice(self._queue, most)))
        for _ in batch:
            self._queue.popleft()
        arrays = self._arrays(batch)
        rows = self._size * self._group
        for start in range(0, len(batch), rows):
            place = slice(start // self._group, start // self._group + self._size)
            self._parts.append((batch[start:start + rows], jax.tree.map(lambda x: x[place], arrays)))

    def _arrays(self, batch: list[Request]) -> tuple:
        """`(prompt tokens, prompt mask, words of keys, forced beginnings and limits by name)` of a batch, [P, ...] each."""
        P, G, T = self._prompts, self._group, self._max_tokens
        prompts = [list(one.tokens) for one in batch[::G]]
        missing = P - len(prompts)
        length = smallest(prompt_buckets(self._prompt_tokens), max(map(len, prompts)))
        padded = pad(prompts + [prompts[0]] * missing, [0] * P, length)
        keys = np.array([one.key for one in batch] + [(0, 0)] * (missing * G), np.uint32).reshape(P, G, 2)
        own: dict[str, Any] = {}
        if "forced" in self._wants:
            tokens, count = np.zeros((P * G, T), np.int32), np.zeros(P * G, np.int32)
            for row, one in enumerate(batch):
                tokens[row, :len(one.forced)], count[row] = one.forced, len(one.forced)
            own["forced"] = Forced(tokens.reshape(P, G, T), count.reshape(P, G))
        if "limits" in self._wants:
            own["limits"] = np.array([one.limit for one in batch[::G]] + [1] * missing, np.int32)
        return padded.tokens, padded.mask, keys, own


def _nodes(flight: _Flight, made: Completions) -> list[Node]:
    """The completions of a part as nodes, without those that pad it."""
    T = made.mask.shape[-1]
    mask, stopped = np.asarray(made.mask).reshape(-1, T), np.asarray(made.stopped).reshape(-1)
    tokens, logprobs, entropies = (np.asarray(x).reshape(-1, T) for x in (made.tokens, made.logprobs, made.entropies))
    more = {name: np.asarray(x).reshape(-1, *x.shape[2:]) for name, x in made.columns.items()}
    return [Node(one.uid, None, len(one.tokens), tokens[i, :n], logprobs[i, :n], entropies[i, :n],
                 np.full(n, flight.version, np.int32), "stop" if stopped[i] else "limit",
                 {name: x[i, :n] for name, x in more.items()})
            for i, (one, n) in enumerate(zip(flight.requests, mask.sum(-1).tolist()))]


def program_of(run: Wanted) -> Guarded:
    """The compiled sampler of a run."""
    compiled = functools.partial(generate, run.model, max_tokens=run.max_tokens, stop_ids=run.stop_ids, mesh=run.mesh,
                                 columns=run.columns)
    return Guarded("rollout", compiled, run.programs * len(prompt_buckets(run.prompt_tokens)))


@engine(name="scan", provides=tuple(sorted(CAN)))
def kind(run: Wanted, program: Guarded | None = None) -> EngineKind:
    """The scan sampler of a run, by its `program` if one is there already."""
    program = program or program_of(run)

    def make(params: Any, lora: Any, version: int) -> ScanEngine:
        return ScanEngine(program, params, lora, version, prompts=run.prompts, group=run.group, parts=run.parts,
                          prompt_tokens=run.prompt_tokens, max_tokens=run.max_tokens, mesh=run.mesh,
                          vocab=run.model.config.vocab_size, wants=run.wants)

    config = run.model.config
    return EngineKind("scan", make, CAN, measures.provided(config), columns=measures.columns_of(run.columns, config))

"""The slot engine's contract over a server: continuing a trajectory is a new request with all its tokens so far."""
import dataclasses
import hashlib
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxrl_llm.engines import base, scan
from jaxrl_llm.engines.base import Collects, EngineKind, Wanted
from jaxrl_llm.engines.requests import Node, Request, as_ints, check_sampling, held
from jaxrl_llm.engines.sampler import row_keys
from jaxrl_llm.engines.scan import ScanEngine
from jaxrl_llm.engines.server.answers import Completion
from jaxrl_llm.engines.server.client import ServerError
from jaxrl_llm.engines.server.server import Server, Stale

CAN = frozenset({"extend", "forced", "limits", "numbers", "stop_texts", "beside"})
_STALE = 3  # answers by other weights in a row, after which a trajectory is given up


@dataclasses.dataclass(eq=False)
class _Row:
    """A trajectory: its `tokens`, `drawn` of them by the policy, which may write `limit`; `asked`, while it runs.

    stream: bytes from which its seeds are derived.  stale: consecutive answers by other weights.  begun: the forced beginning
    of its node; None: there is none.
    """

    request: Request
    tokens: list[int]
    limit: int
    stream: bytes
    drawn: int = 0
    stale: int = 0
    begun: Node | None = None
    asked: "Future[Completion] | None" = None

    @property
    def seed(self) -> int:
        """The seed of the draws from here on, independent of the seeds of other turns."""
        return hashed(self.stream + self.drawn.to_bytes(8, "big"))


class ExternalEngine(Collects):
    """Samples trajectories by requests to a server, as `engines.engine.SlotEngine` does in its slots.

    A trajectory's draws are determined by the key, its uid and the number of tokens drawn so far, provided that the server
    draws by seeds alone. Forks and stop sequences of tokens are not supported; a running row cannot be paused or extended.
    Servers tell no log-probs of tokens that they are given, so that an engine of this process measures forced beginnings.

    Attributes:
      version: policy version of the weights in use.
    """

    computed = 0
    decoded = ()

    def __init__(self, server: Server, params, key: jax.Array, *, slot_tokens: int, version: int = 0, lora=None,
                 measures: ScanEngine | None = None):
        """
        Args:
          server: the server that samples; these weights are published to it.
          key: the run's key, from which the seeds of trajectories are derived.
          slot_tokens: maximum number of tokens of a trajectory, prompt included.
          measures: an engine with these weights that measures forced beginnings; None: they are refused.
        """
        self._server, self._key, self._versions, self._measures = server, key, {}, measures
        self._rows: dict[int, _Row] = {}
        self._done: list[Node] = []
        self._ready: queue.SimpleQueue[tuple[int, Future[Completion]]] = queue.SimpleQueue()
        self.publish(version, params, lora)
        server.check_room(slot_tokens)

    def submit(self, *requests: Request) -> None:
        """Requests trajectories: all of them, or none if one is refused. Raises ValueError for a request that cannot be met."""
        rows: dict[int, _Row] = {}
        for request in requests:
            check_sampling(request)
            if request.uid in self._rows or request.uid in rows:
                raise ValueError(f"uid {request.uid} was submitted before; release it, or give this trajectory its own uid")
            if request.parent is not None or len(request.stop_sequences):
                raise ValueError(f"uid {request.uid} forks another, or has stop sequences of tokens, which servers do not "
                                 "support; give all tokens as the prompt, and stop texts")
            if len(request.forced) and self._measures is None:
                raise ValueError(f"uid {request.uid} needs an engine that {base.CAN['forced']}, and this one is made without; "
                                 "make it with wants={'forced'}")
            if request.limit <= request.drawn or not len(request.tokens):
                raise ValueError(f"uid {request.uid} has {len(request.tokens)} tokens and a limit of {request.limit}; give one "
                                 "at least of each")
            rows[request.uid] = _Row(request, as_ints(request.tokens), request.limit, self._stream(request), request.drawn)
        self._rows |= rows
        for uid, begun in self._begun([request for request in requests if len(request.forced)]).items():
            row = rows.pop(uid)
            row.begun, row.drawn, row.tokens = begun, row.drawn + len(begun.tokens), row.tokens + begun.tokens.tolist()
            if begun.finish == "stop" or row.drawn >= row.limit:
                self._done.append(self._ended(row, begun))
            else:
                self._ask(row)
        for row in rows.values():
            self._ask(row)

    def _begun(self, requests: Sequence[Request]) -> dict[int, Node]:
        """The forced beginnings of trajectories, measured in this process."""
        nodes = dict[int, Node]()
        if requests:
            assert self._measures is not None
            keys = [(0, 0) if one.key is None else one.key for one in requests]  # nothing is drawn
            self._measures.submit(*(dataclasses.replace(one, limit=min(len(one.forced), one.limit), key=key)
                                    for one, key in zip(requests, keys)))
        while len(nodes) < len(requests):
            nodes |= {node.uid: node for node in self._measures.collect()}
        return nodes

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Appends tokens that the policy did not write to an ended trajectory, which then continues, with a new `limit` if any.

        Raises KeyError for a uid that is not held and ValueError for one that runs, or whose limit is reached.
        """
        row = self._held(uid)
        limit = row.limit if limit is None else limit
        if row.asked is not None:
            raise ValueError(f"uid {uid} runs; wait for its node")
        if limit <= row.drawn or not len(tokens):
            raise ValueError(f"uid {uid} is given {len(tokens)} tokens and a limit of {limit}, {row.drawn} of which are there "
                             "already; give more")
        row.tokens += as_ints(tokens)
        row.limit = limit
        self._ask(row)

    def release(self, uid: int) -> None:
        """Forgets a trajectory; a request for it is cancelled. Raises KeyError for a uid that is not held."""
        row = self._held(uid)
        del self._rows[uid]
        if row.asked is not None:
            row.asked.cancel()

    def publish(self, version: int, params, lora=None) -> None:
        """Uses other weights for requests from now on. Errors as in `Server.publish`."""
        self._versions[self._server.publish(params, lora)] = version
        self.version = version
        if self._measures is not None:
            self._measures.publish(version, params, lora)

    def written(self, uid: int) -> None:
        """None: a server answers with whole nodes."""

    def rest(self) -> None:
        """Frees weights that are kept for measurements: the server has its own."""
        if self._measures is not None:
            self._measures.rest()

    def step(self) -> bool:
        """Waits for an answer, if a request is open, and takes all that are there; returns whether one was open.

        If the server answers with other weights, the run's weights are published to it again and the request is repeated.

        Raises `Fault`, `Refusal` or `Stale` for a failed request, with a note that names its uid. All others continue, and
        are returned by the next call.
        """
        waits = True
        while any(row.asked is not None for row in self._rows.values()) and (waits or not self._ready.empty()):
            uid, asked = self._ready.get()
            row = self._rows.get(uid)
            if row is None or row.asked is not asked:
                continue  # released since
            error = asked.exception()
            if error is not None and self._done:
                self._ready.put((uid, asked))  # for the next call, as these nodes are to be returned
                return True
            waits, row.asked = False, None
            if error is None:
                self._done.append(self._node(row, asked.result()))
            else:
                self._failed(row, error)
        return not waits

    def _node(self, row: _Row, made: Completion) -> Node:
        start, row.drawn, row.stale = len(row.tokens), row.drawn + len(made.tokens), 0
        row.tokens += made.tokens.tolist()
        node = Node(row.request.uid, None, start, made.tokens, made.logprobs, made.entropies,
                    np.array([self._versions.get(tag, self.version) for tag in made.tags], np.int32), made.finish)
        return self._ended(row, node if row.begun is None else joined(row.begun, node))

    def _ended(self, row: _Row, node: Node) -> Node:
        """A node of a row, which is forgotten unless it may go on."""
        row.begun = None
        if not row.request.keep:
            del self._rows[row.request.uid]
        return node

    def _failed(self, row: _Row, error: BaseException) -> None:
        """Repeats the request, a few times, if the server had other weights; otherwise raises the error."""
        row.stale += 1
        if isinstance(error, Stale) and row.stale <= _STALE:
            self._server.renew()
            self._ask(row)
        else:
            if isinstance(error, ServerError):
                error.add_note(f"trajectory {row.request.uid}, {len(row.tokens)} tokens so far")
            raise error

    def _stream(self, request: Request) -> bytes:
        if request.key is not None:
            return np.asarray(request.key, np.uint32).tobytes()
        if request.seed is not None:
            return request.seed.to_bytes(8, "big")
        return np.asarray(jax.random.key_data(row_keys(self._key, np.array([request.uid], np.int64)))).tobytes()

    def _held(self, uid: int) -> _Row:
        return held(self._rows, uid)

    def _ask(self, row: _Row) -> None:
        uid = row.request.uid
        row.asked = self._server.complete(row.request, row.tokens, row.limit - row.drawn, row.seed)
        row.asked.add_done_callback(lambda done: None if done.cancelled() else self._ready.put((uid, done)))


def joined(begun: Node, rest: Node) -> Node:
    """A node whose first tokens are those of `begun`."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(begun, name), getattr(rest, name)])
               for name in ("tokens", "logprobs", "entropies", "policy_version")}
    return dataclasses.replace(rest, start=begun.start, **columns)


def hashed(stream: bytes) -> int:
    """A seed, 0 to 2^62 - 1, derived from these bytes."""
    return int.from_bytes(hashlib.blake2b(stream, digest_size=8).digest(), "big") >> 2


def kind(run: Wanted) -> EngineKind:
    """The engine of a run whose server samples."""
    inner = None
    if "forced" in run.wants:
        inner = scan.kind(run._replace(wants=frozenset({"forced", "limits"}), parts=1, columns=()))

    def make(params, lora, version: int) -> ExternalEngine:
        return ExternalEngine(run.server, params, jax.random.key(0), slot_tokens=run.prompt_tokens + run.max_tokens,
                              version=version, lora=lora, measures=inner and inner.make(params, lora, version))

    return EngineKind("server", make, CAN, frozenset(("logprobs", "version")), check=run.server.check,
                      rows=(("sampled by", run.server.url),))

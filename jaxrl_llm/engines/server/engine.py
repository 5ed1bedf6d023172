"""The slot engine's contract over a server: continuing a trajectory is a new request with all its tokens so far."""
import dataclasses
import hashlib
import queue
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jaxrl_llm.engines.base import Collects, EngineKind, Wanted
from jaxrl_llm.engines.requests import Node, Request, as_ints, check_sampling, held
from jaxrl_llm.engines.sampler import row_keys
from jaxrl_llm.engines.server.answers import Completion
from jaxrl_llm.engines.server.client import ServerError
from jaxrl_llm.engines.server.server import Server, Stale

CAN = frozenset({"extend", "limits", "numbers", "stop_texts", "beside"})
_STALE = 3  # answers by other weights in a row, after which a trajectory is given up


@dataclasses.dataclass(eq=False)
class _Row:
    """A trajectory: its `tokens`, `drawn` of them by the policy, which may write `limit`; `asked`, while it runs.

    stream: bytes from which its seeds are derived.  stale: consecutive answers by other weights.
    """

    request: Request
    tokens: list[int]
    limit: int
    stream: bytes
    drawn: int = 0
    stale: int = 0
    asked: "Future[Completion] | None" = None

    @property
    def seed(self) -> int:
        """The seed of the draws from here on, independent of the seeds of other turns."""
        return hashed(self.stream + self.drawn.to_bytes(8, "big"))


class ExternalEngine(Collects):
    """Samples trajectories by requests to a server, as `engines.engine.SlotEngine` does in its slots.

    A trajectory's draws are determined by the key, its uid and the number of tokens drawn so far, provided that the server
    draws by seeds alone. Forks and stop sequences of tokens are not supported; a running row cannot be paused or extended.

    Attributes:
      version: policy version of the weights in use.
    """

    computed = 0
    decoded = ()

    def __init__(self, server: Server, params, key: jax.Array, *, slot_tokens: int, version: int = 0, lora=None):
        """
        Args:
          server: the server that samples; these weights are published to it.
          key: the run's key, from which the seeds of trajectories are derived.
          slot_tokens: maximum number of tokens of a trajectory, prompt included.
        """
        self._server, self._key, self._versions = server, key, {}
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
            if request.limit <= request.drawn or not len(request.tokens):
                raise ValueError(f"uid {request.uid} has {len(request.tokens)} tokens and a limit of {request.limit}; give one "
                                 "at least of each")
            rows[request.uid] = _Row(request, as_ints(request.tokens), request.limit, self._stream(request), request.drawn)
        self._rows |= rows
        for row in rows.values():
            self._ask(row)

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

    def written(self, uid: int) -> None:
        """None: a server answers with whole nodes."""

    def rest(self) -> None:
        """Does nothing: the server has the weights."""

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


def hashed(stream: bytes) -> int:
    """A seed, 0 to 2^62 - 1, derived from these bytes."""
    return int.from_bytes(hashlib.blake2b(stream, digest_size=8).digest(), "big") >> 2


def kind(run: Wanted) -> EngineKind:
    """The engine of a run whose server samples."""
    def make(params, lora, version: int) -> ExternalEngine:
        return ExternalEngine(run.server, params, jax.random.key(0), slot_tokens=run.prompt_tokens + run.max_tokens,
                              version=version, lora=lora)

    return EngineKind("server", make, CAN, frozenset(("logprobs", "version")), check=run.server.check,
                      rows=(("sampled by", run.server.url),))

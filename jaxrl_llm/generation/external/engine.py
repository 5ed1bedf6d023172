"""The slot engine's contract over a server: continuing a trajectory is a new request with all its tokens so far."""
import dataclasses
import hashlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jaxrl_llm.generation.by_engine import completed, request_of
from jaxrl_llm.generation.external.answers import Completion
from jaxrl_llm.generation.external.client import ServerError
from jaxrl_llm.generation.external.server import Server, Stale
from jaxrl_llm.generation.requests import Node, Request, as_ints, check_sampling, held
from jaxrl_llm.generation.sampler import Completions, row_keys
from jaxrl_llm.generation.sampling import Sampling

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


class ExternalEngine:
    """Samples trajectories by requests to a server, as `generation.engine.Engine` does in its slots.

    A trajectory's draws are determined by the key, its uid and the number of tokens drawn so far, provided that the server
    draws by seeds alone. Forks and stop sequences of tokens are not supported; a running row cannot be paused or extended.

    Attributes:
      version: policy version of the weights in use.
    """

    def __init__(self, server: Server, params, key: jax.Array, *, slot_tokens: int, version: int = 0, lora=None):
        """
        Args:
          server: the server that samples; these weights are published to it.
          key: the run's key, from which the seeds of trajectories are derived.
          slot_tokens: maximum number of tokens of a trajectory, prompt included.
        """
        self._server, self._key, self._versions = server, key, {}
        self._rows: dict[int, _Row] = {}
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
            if request.limit < 1 or not len(request.tokens):
                raise ValueError(f"uid {request.uid} has {len(request.tokens)} tokens and a limit of {request.limit}; give one "
                                 "at least of each")
            rows[request.uid] = _Row(request, as_ints(request.tokens), request.limit, self._stream(request))
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

    def collect(self) -> list[Node]:
        """Waits until a node is finished and returns all finished nodes; an empty list if no request is open.

        If the server answers with other weights, the run's weights are published to it again and the request is repeated.

        Raises `Fault`, `Refusal` or `Stale` for a failed request, with a note that names its uid. All others continue, and
        are returned by the next call.
        """
        nodes: list[Node] = []
        while any(row.asked is not None for row in self._rows.values()) and (not nodes or not self._ready.empty()):
            uid, asked = self._ready.get()
            row = self._rows.get(uid)
            if row is None or row.asked is not asked:
                continue  # released since
            error = asked.exception()
            if error is not None and nodes:
                self._ready.put((uid, asked))  # for the next call, as these nodes are to be returned
                break
            row.asked = None
            if error is None:
                nodes.append(self._node(row, asked.result()))
            else:
                self._failed(row, error)
        return nodes

    def _node(self, row: _Row, made: Completion) -> Node:
        start, row.drawn, row.stale = len(row.tokens), row.drawn + len(made.tokens), 0
        row.tokens += made.tokens.tolist()
        if not row.request.keep:
            del self._rows[row.request.uid]
        return Node(row.request.uid, None, start, made.tokens, made.logprobs, made.entropies,
                    np.array([self._versions.get(tag, self.version) for tag in made.tags], np.int32), made.finish)

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


def generate(server: Server, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *, max_tokens: int,
             stop_ids: tuple[int, ...], stop_texts: Sequence[str] = (), lora=None) -> Iterator[Completions]:
    """As `sampler.generate`, but sampled by a server; yields completions as `by_engine.completed` does.

    The server draws a row with a seed derived from the row's key. A completion ends at its first stop text. Raises `Fault`,
    `Refusal` and `Stale`.
    """
    prompts, mask, words = (np.asarray(x) for x in jax.device_get((prompt_tokens, prompt_mask, jax.random.key_data(keys))))
    P, G = words.shape[:2]
    asked = dataclasses.replace(request_of(sampling, max_tokens, stop_ids), stop_texts=tuple(stop_texts))
    engine = ExternalEngine(server, params, jax.random.key(0), slot_tokens=prompts.shape[1] + max_tokens, lora=lora)
    engine.submit(*(dataclasses.replace(asked, uid=p * G + g, tokens=prompts[p][mask[p]].tolist(),
                                        seed=hashed(words[p, g].tobytes())) for p in range(P) for g in range(G)))
    yield from completed(engine, P, G, max_tokens)

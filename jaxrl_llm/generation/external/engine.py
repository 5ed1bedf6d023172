"""The contract of the slot engine, met by a server: a trajectory that goes on is a new request with all tokens so far."""
import dataclasses
import hashlib
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxrl_llm.generation.engine import Node, Request
from jaxrl_llm.generation.external.client import ServerError
from jaxrl_llm.generation.external.server import Completion, Server
from jaxrl_llm.generation.sampler import Completions, row_keys
from jaxrl_llm.generation.sampling import Sampling, check
from jaxrl_llm.models.transformer import Transformer


@dataclasses.dataclass(eq=False)
class _Row:
    """A trajectory: all its `tokens`, of which the policy wrote `drawn` and may write `limit`; `asked`, where it runs."""

    request: Request
    tokens: list[int]
    limit: int
    words: bytes
    drawn: int = 0
    asked: "Future[Completion] | None" = None

    @property
    def seed(self) -> int:
        """Of the draws from here on: those of one turn have nothing to do with those of another."""
        if not self.drawn and self.request.seed is not None:
            return self.request.seed
        made = hashlib.blake2b(self.words + self.drawn.to_bytes(8, "big"), digest_size=8)
        return int.from_bytes(made.digest(), "big") >> 2


class ExternalEngine:
    """Samples trajectories by requests to a server, as `generation.engine.Engine` does in its slots.

    What a trajectory draws follows from the key, its uid and how many tokens it has drawn, where the server draws by seeds
    alone. There are no forks, no stop sequences of tokens, and a row that runs is not extended.

    Attributes:
      version: of the weights in use.
    """

    def __init__(self, server: Server, params, key: jax.Array, *, version: int = 0, lora=None):
        """
        Args:
          server: that samples; these weights are published to it.
          key: the run's key, from which those of trajectories follow.
        """
        self._server, self._key, self._versions = server, key, {}
        self._rows: dict[int, _Row] = {}
        self._ready: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
        self.publish(version, params, lora)

    def submit(self, *requests: Request) -> None:
        """Asks for trajectories; where one is refused, none is asked for. Raises ValueError for what cannot be met."""
        for request in requests:
            check(request.sampling)
            if request.uid in self._rows:
                raise ValueError(f"uid {request.uid} was submitted before; release it, or give this trajectory its own uid")
            if request.parent is not None or len(request.stop_sequences):
                raise ValueError(f"uid {request.uid} is to fork another, or has stop sequences of tokens, which servers do not "
                                 "know; give all tokens as the prompt, and stop texts")
            if request.limit < 1 or not len(request.tokens):
                raise ValueError(f"uid {request.uid} has {len(request.tokens)} tokens and a limit of {request.limit}; give one "
                                 "at least of each")
        if len({request.uid for request in requests}) < len(requests):
            raise ValueError("several of these requests have one uid; give each trajectory its own")
        keys = np.asarray(jax.random.key_data(row_keys(self._key, np.array([request.uid for request in requests], np.int64))))
        for request, words in zip(requests, keys):
            own = words.tobytes() if request.seed is None else request.seed.to_bytes(8, "big")
            self._rows[request.uid] = row = _Row(request, [int(t) for t in request.tokens], request.limit, own)
            self._ask(row)

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Puts tokens of others behind a trajectory that has ended, which then goes on, with another `limit` if one is given.

        Raises KeyError for a uid that is not held and ValueError for one that runs, or whose limit is reached.
        """
        row = self._held(uid)
        limit = row.limit if limit is None else limit
        if row.asked is not None or limit <= row.drawn or not len(tokens):
            raise ValueError(f"uid {uid} " + ("runs; wait for its node" if row.asked is not None else
                             f"is given {len(tokens)} tokens and a limit of {limit}, with {row.drawn} drawn; give more"))
        row.tokens += [int(t) for t in tokens]
        row.limit = limit
        self._ask(row)

    def resume(self, uid: int) -> None:
        """Asks again for a trajectory whose request failed.

        Raises KeyError for a uid that is not held, ValueError for one that runs or has reached its limit.
        """
        row = self._held(uid)
        if row.asked is not None or row.limit <= row.drawn:
            raise ValueError(f"uid {uid} " + ("runs" if row.asked is not None else "has reached its limit; extend it"))
        self._ask(row)

    def release(self, uid: int) -> None:
        """Forgets a trajectory; a request for it is cancelled. Raises KeyError for a uid that is not held."""
        row = self._held(uid)
        del self._rows[uid]
        if row.asked is not None:
            row.asked.cancel()

    def publish(self, version: int, params, lora=None) -> None:
        """Other weights for requests from now on. Errors as in `Server.publish`."""
        self._versions[self._server.publish(params, lora)] = version
        self.version = version

    def collect(self) -> list[Node]:
        """Waits until a node is finished and returns all that are; an empty list where nothing is asked for.

        Raises `Fault` or `Refusal` for a request that failed. It has a note with its uid, and the attribute `uid`; the
        trajectory stays as it was, to be asked for again by `resume`. All others go on, and are returned by the next call.
        """
        found: list[Node] = []
        while any(row.asked is not None for row in self._rows.values()) and (not found or not self._ready.empty()):
            uid, asked = self._ready.get()
            row = self._rows.get(uid)
            if row is None or row.asked is not asked:
                continue  # released since
            if asked.exception() is not None and found:
                self._ready.put((uid, asked))  # for the next call, as these nodes are to be returned
                break
            row.asked = None
            found.append(self._node(row, asked))
        return found

    def _node(self, row: _Row, asked: "Future[Completion]") -> Node:
        uid = row.request.uid
        try:
            made = asked.result()
        except ServerError as error:
            error.uid = uid
            error.add_note(f"trajectory {uid}, {len(row.tokens)} tokens so far; the others go on")
            raise
        start, row.drawn = len(row.tokens), row.drawn + len(made.tokens)
        row.tokens += made.tokens.tolist()
        if not row.request.keep:
            del self._rows[uid]
        return Node(uid, None, start, made.tokens, made.logprobs, made.entropies,
                    np.asarray([self._versions.get(tag, self.version) for tag in made.tags], np.int32), made.finish)

    def _held(self, uid: int) -> _Row:
        if uid not in self._rows:
            raise KeyError(f"uid {uid} is not held: it was never submitted, or was released, or ended and its request did not "
                           "say keep=True")
        return self._rows[uid]

    def _ask(self, row: _Row) -> None:
        uid = row.request.uid
        row.asked = self._server.complete(row.request, row.tokens, row.limit - row.drawn, row.seed)
        row.asked.add_done_callback(lambda done: None if done.cancelled() else self._ready.put((uid, done)))


def generate(server: Server, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *, max_tokens: int,
             stop_ids: tuple[int, ...], stop_texts: Sequence[str] = (), lora=None) -> Completions:
    """As `sampler.generate`, by a server; arrays of the host.

    Token t of a row is drawn by the server, with a seed that follows from the row's key. Completions with a stop text end
    there. Raises `Fault` and `Refusal`.
    """
    prompts, mask, words = (np.asarray(x) for x in jax.device_get((prompt_tokens, prompt_mask, jax.random.key_data(keys))))
    P, G = words.shape[:2]
    limit = max_tokens if sampling.max_tokens is None else min(max_tokens, int(sampling.max_tokens))
    seeds = (words.astype(np.uint64) << np.array([32, 0], np.uint64)).sum(-1) >> np.uint64(2)
    engine = ExternalEngine(server, params, jax.random.key(0), lora=lora)
    engine.submit(*(Request(p * G + g, limit, prompts[p][mask[p]].tolist(), sampling=sampling.replace(max_tokens=None),
                            stop_tokens=stop_ids, stop_texts=tuple(stop_texts), seed=int(seeds[p, g]))
                    for p in range(P) for g in range(G)))
    found: Any = {name: np.zeros((P, G, max_tokens), dtype) for name, dtype in (
        ("tokens", np.int32), ("mask", bool), ("logprobs", np.float32), ("entropies", np.float32))}
    found["stopped"], longest = np.zeros((P, G), bool), 1
    while nodes := engine.collect():
        for node in nodes:
            row, count = divmod(node.uid, G), len(node.tokens)
            for name in ("tokens", "logprobs", "entropies"):
                found[name][row][:count] = getattr(node, name)
            found["mask"][row][:count], found["stopped"][row] = True, node.finish == "stop"
            longest = max(longest, count)
    return Completions(**found | {"decode_steps": np.int32(longest - 1)})


def engine_for(server: Server, model: Transformer, params, key: jax.Array, *, version: int = 0, lora=None, slots: int = 0,
               slot_tokens: int = 0, tokenizer=None) -> ExternalEngine:
    """Made as `Engine(model, params, key, slots=..., ...)` is; slots and their sizes are the server's."""
    return ExternalEngine(server, params, key, version=version, lora=lora)

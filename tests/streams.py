"""Streams of tests: groups that one grows, and engines whose completions are written by hand."""
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.engines import Completions, scan
from jaxrl_llm.engines.base import EngineKind
from jaxrl_llm.engines.requests import Node, Request
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.parallel import make_mesh
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.topologies import groups

BYTES, EOS = ByteTokenizer(), 258


def grow(stream: Stream, params, forest: Forest, rows, uid: int, key, version: int = 0, *, lora=None, timer=None, limits=None,
         **knobs) -> Forest:
    """The forest with a group more for each of `rows`, sampled under a snapshot of these weights and knobs."""
    stream.publish(Snapshot(version, params, lora, key, knobs))
    acts = groups(rows, stream.group)
    if limits is not None:
        acts = [dataclasses.replace(act, limit=int(limit)) for act, limit in zip(acts, limits, strict=True)]
    return stream.run(forest, acts, uid, timer)


def completions(groups: Sequence[Sequence[str]], T: int = 8) -> Completions:
    """`Completions` of texts; a text that ends in `$` ends with the stop token, others were cut."""
    P, G = len(groups), len(groups[0])
    tokens, mask, stopped = np.zeros((P, G, T), np.int32), np.zeros((P, G, T), bool), np.zeros((P, G), bool)
    for p, g in np.ndindex(P, G):
        text = groups[p][g]
        stopped[p, g] = text.endswith("$")
        ids = [*text.removesuffix("$").encode(), *([EOS] if stopped[p, g] else [])]
        tokens[p, g, :len(ids)], mask[p, g, :len(ids)] = ids, True
    return Completions(tokens, mask, np.where(mask, -0.5, 0).astype(np.float32), np.where(mask, 1.5, 0).astype(np.float32),
                       stopped, np.int32(T))


def node(uid: int, text: str, start: int = 0, version: int = 0) -> Node:
    """A node of this text, as in `completions`."""
    stopped = text.endswith("$")
    ids = [*text.removesuffix("$").encode(), *([EOS] if stopped else [])]
    numbers = np.ones(len(ids), np.float32)
    return Node(uid, None, start, np.array(ids, np.int32), -0.5 * numbers, 1.5 * numbers, np.full(len(ids), version, np.int32),
                "stop" if stopped else "limit")


def in_parts(program: Callable[..., Completions], prompts: int, group: int, parts: int = 1, *, prompt_tokens: int = 4,
             max_tokens: int = 8) -> EngineKind:
    """The scan engine around a `program` whose completions are known."""
    def make(params, lora, version):
        return scan.ScanEngine(program, params, lora, version, prompts=prompts, group=group, parts=parts,
                               prompt_tokens=prompt_tokens, max_tokens=max_tokens, mesh=make_mesh(),
                               vocab=BYTES.vocab_size)

    return EngineKind("in parts", make, scan.CAN)


class Teller:
    """An engine that returns the nodes which `tell(requests, version)` yields, a list at a time, for all that is submitted."""

    computed = 0
    decoded = ()

    def __init__(self, tell: Callable[[list[Request], int], Iterator[list[Node]]], version: int):
        self.version, self._tell, self._waiting, self._running = version, tell, list[Request](), iter(())
        self._done: list[Node] = []

    def publish(self, version, params, lora=None):
        self.version = version

    def submit(self, *requests: Request) -> None:
        self._waiting += requests

    def step(self) -> bool:
        self._done += self.collect()
        return bool(self._done)

    def finished(self) -> list[Node]:
        done, self._done = self._done, []
        return done

    def collect(self) -> list[Node]:
        if self._waiting:
            self._running, self._waiting = self._tell(self._waiting, self.version), []
        return next(self._running, [])

    def rest(self) -> None:
        """Does nothing: it has no weights."""


def beside(tell: Callable[[list[Request], int], Iterator[list[Node]]]) -> EngineKind:
    """An engine whose known nodes come one list after another, in a thread beside the rewards of those that have ended."""
    return EngineKind("beside", lambda params, lora, version: Teller(tell, version), frozenset({"beside"}))

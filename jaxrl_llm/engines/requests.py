"""Requests to an engine, the nodes that it answers with, and the host's state of the rows in between."""
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.engines.measures import Measure, entries_of, of_node
from jaxrl_llm.engines.sampling import Sampling, check
from jaxrl_llm.engines.stopping import StopSearch

RowT = TypeVar("RowT")


@dataclasses.dataclass(frozen=True)
class Request:
    """A trajectory to sample.

    Attributes:
      uid: its number in the run, from which its random numbers are derived.
      limit: maximum number of policy tokens in it, its parent's included.
      tokens: the prompt, and what the trajectory begins with behind it; with a parent, what is appended to its tokens.
      parent: uid of the trajectory that it continues, from that one's current token.
      sampling: the distribution to draw from, without `spread`, and without `max_tokens` below the limit.
      stop_tokens: tokens that end it.  stop_sequences: sequences of tokens.  stop_texts: texts, wherever tokens end.
      stops_in_context: whether the text in which stop texts are found continues that of the tokens before it; otherwise it is
        that of its own tokens alone, which with sentencepiece lacks a space at the beginning, as the text that rewards read.
      begun: how many of the last tokens are the beginning of its text, in which stop strings may begin.
      keep: whether it is held after its end, to be forked or extended, until it is released.
      seed: number from which its random numbers are derived instead of its uid, 0 to 2^63 - 1; None: the uid.
      drawn: how many tokens of the trajectory behind its prompt are there already; the limit counts them, and random numbers
        follow on.
      written: what the policy has written of its node already, from which the engine continues; None: nothing.
      key: words of the key that replaces uid and run's key in that derivation, see `sampler.row_keys`; None: those two.
    """

    uid: int
    limit: int
    tokens: Sequence[int] = ()
    parent: int | None = None
    sampling: Sampling = Sampling()
    stop_tokens: Sequence[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()
    stop_texts: Sequence[str] = ()
    stops_in_context: bool = False
    begun: int = 0
    keep: bool = False
    seed: int | None = None
    drawn: int = 0
    written: "Node | None" = None
    key: tuple[int, int] | None = None

    @property
    def stream(self) -> int:
        """The number from which its random numbers are derived."""
        return self.uid if self.seed is None else self.seed


@dataclasses.dataclass(frozen=True)
class Node:
    """Consecutive tokens that the policy wrote.

    Attributes:
      uid: the trajectory.  parent: the one that it was forked from, or None.
      start: number of tokens of the trajectory before it, prompt and parent's tokens included.
      tokens: `i32[n]`, the stop token or stop string included.
      logprobs, entropies: `f32[n]`, of the distribution that each was drawn from, nats.
      policy_version: `i32[n]`, version of the weights that drew each token.
      finish: why it ends: "stop" (a stop token), "stop_string" (a sequence or text), "limit", "extended" (tokens that the
        policy did not write come next) or "paused"; "running" while it continues, see `SlotEngine.written`.
      columns: further columns of the tokens by name, `[n, ...]`, see `engines.measures`.
    """

    uid: int
    parent: int | None
    start: int
    tokens: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    policy_version: np.ndarray
    finish: str
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Row:
    """The host's state of a trajectory.

    Attributes:
      request: with the limit and the sampling that hold now.
      tokens: all of it.  cached: how many of them are in its cache, all but the last where it decodes.
      drawn: how many the policy wrote.
      start: where its current node begins.  search: stop strings of the completion, which may have begun before a fork.
      measured: log-prob, entropy and version of each token of the node, then its further columns, see `measures.of_node`.
      paused: whether it waits for `resume`, in its slot until another row needs that.
      slot: its slot, where it decodes unless it is idle or waits to read.
      source: the row in whose slot its cache lies, while it has no slot; that row's cache only grows, so it may go on, except
        with sliding windows.
      forks: rows whose `source` it is.
      cache: a copy of its cache on the host, while it has none on the device; None otherwise, or if nothing is cached.
      pages: with paged caches, the pages of its cache, in order; whoever shares one writes into a copy of it.
      shard: the shard that has these pages.
      finish: why it ended and waits for `extend`, in its slot until another row needs that; None: it has not ended.
      begun: policy version that computed its cache's first places, and how many; forks have those of the parent.
      measures: those of its further columns.
    """

    request: Request
    tokens: list[int]
    search: StopSearch
    cached: int = 0
    drawn: int = 0
    start: int = 0
    measured: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    paused: bool = False
    slot: int | None = None
    source: "Row | None" = None
    forks: "list[Row]" = dataclasses.field(default_factory=list)
    cache: Any = None
    pages: list[int] = dataclasses.field(default_factory=list)
    shard: int = 0
    finish: str | None = None
    begun: tuple[int, int] = (0, 0)
    measures: Sequence[Measure] = ()

    @property
    def left(self) -> int:
        return self.request.limit - self.drawn

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def idle(self) -> bool:
        """Whether it keeps its slot only until another row needs that."""
        return self.ended or self.paused

    @property
    def new(self) -> bool:
        """Whether it has read nothing yet, and no other row has for it."""
        return not self.cached and self.source is None

    @property
    def yields(self) -> bool:
        """Whether nobody needs its cache any more once it has ended."""
        return not self.request.keep and not self.forks

    @property
    def decodes(self) -> bool:
        """Whether it is in a slot and goes on."""
        return self.slot is not None and not self.idle

    @property
    def holds_cache(self) -> bool:
        """Whether its cache lies on the device, in its own slot or in pages."""
        return self.cached > 0 and (self.slot is not None or bool(self.pages))

    @property
    def on_device(self) -> bool:
        """Whether its cache, its own or that of its source, is lost with the device's arrays."""
        return self.slot is not None or self.source is not None or bool(self.pages)

    def lose_cache(self) -> None:
        """Forgets the cache: the row is read again."""
        self.cached, self.cache, self.source, self.forks, self.pages = 0, None, None, [], []

    def go_on(self, written: Node) -> None:
        """Continues behind what the policy wrote of the node before."""
        new = written.tokens.tolist()
        self.tokens, self.drawn = self.tokens + new, self.drawn + len(new)
        more = entries_of(self.measures, written.columns)
        numbers = (x.tolist() for x in (written.logprobs, written.entropies, written.policy_version))
        self.measured = [*zip(*numbers, *more)]
        self.search.feed(new)

    def node(self, finish: str, since: int = 0) -> Node:
        """What the policy wrote since the last node, without the first `since` tokens."""
        start, entries = self.start + since, self.measured[since:]
        logprobs, entropies, versions = np.asarray([one[:3] for one in entries], np.float64).reshape(-1, 3).T
        return Node(self.request.uid, self.request.parent, start, np.asarray(self.tokens[start:], np.int32),
                    logprobs.astype(np.float32), entropies.astype(np.float32), versions.astype(np.int32), finish,
                    of_node(self.measures, [one[3:] for one in entries]))


def held(rows: Mapping[int, RowT], uid: int) -> RowT:
    """The row of a trajectory that an engine still holds; KeyError for any other."""
    if uid not in rows:
        raise KeyError(f"uid {uid} is not held: it was never submitted, or was released, or ended and its request did not "
                       "say keep=True")
    return rows[uid]


def as_ints(tokens: Sequence[int]) -> list[int]:
    """Tokens as numbers of Python, whatever sequence or array has them."""
    return np.asarray(tokens, np.int64).tolist()


def check_sampling(request: Request) -> None:
    """Raises ValueError for a limit or a distribution that no engine heeds."""
    check(request.sampling)
    if not _whole(request.limit):
        raise ValueError(f"uid {request.uid} has a limit of {request.limit!r} tokens; give a whole number")
    if request.sampling.max_tokens is not None and request.sampling.max_tokens < request.limit:
        raise ValueError(f"uid {request.uid} has sampling.max_tokens={request.sampling.max_tokens} below its limit of "
                         f"{request.limit}; give the limit as Request(limit=...)")
    if request.sampling.spread:
        raise ValueError(f"uid {request.uid} has sampling.spread={request.sampling.spread}, but an engine draws each row by "
                         "itself; leave spread out, or sample with engines.generate")


def check_request(request: Request, tokenizer: Any) -> None:
    """Raises ValueError for a request that no engine could meet."""
    check_sampling(request)
    if not 0 <= request.stream < 2**63:
        raise ValueError(f"uid {request.uid} has the number {request.stream} for its draws; give one from 0 to 2^63 - 1")
    if request.key is not None and not all(0 <= word < 2**32 for word in request.key):
        raise ValueError(f"uid {request.uid} has the key {request.key}; give two words, each from 0 to 2^32 - 1")
    # Rows of a chunk share the arrays of these numbers: one that does not fit would fail all of them.
    if wrong := [token for token in request.stop_tokens if not (_whole(token) and -2**31 <= token < 2**31)]:
        raise ValueError(f"uid {request.uid} has the stop token {wrong[0]!r}; give whole numbers from -2^31 to 2^31 - 1")
    if request.stop_texts and tokenizer is None:
        raise ValueError(f"uid {request.uid} has stop texts, but the engine has no tokenizer to find them with")
    if not all(request.stop_texts) or not all(len(s) for s in request.stop_sequences):
        raise ValueError(f"uid {request.uid} has an empty stop string")


def check_tokens(uid: int, tokens: Sequence[int], vocab: int) -> None:
    """Raises ValueError if there are no tokens, or if some are no whole numbers or outside the vocabulary."""
    if not len(tokens):
        raise ValueError(f"uid {uid} was given no tokens; one at least is needed")
    given = np.asarray(tokens)  # one look at all of them: prompts are long
    if given.dtype.kind not in "iu":
        wrong = [token for token in tokens if not _whole(token)] or [max(tokens, key=abs)]  # one beyond 64 bits
        raise ValueError(f"uid {uid} was given the token {wrong[0]!r}; give whole numbers, 0 to {vocab - 1}")
    if given.min() < 0 or given.max() >= vocab:
        raise ValueError(f"uid {uid} was given a token outside the vocabulary, 0 to {vocab - 1}")


def check_size(uid: int, length: int, limit: int, drawn: int, slot_tokens: int) -> None:
    """Raises ValueError for a trajectory of `length` tokens, `drawn` of the policy, that has no token left or may not fit."""
    if limit <= drawn:
        raise ValueError(f"uid {uid} has a limit of {limit} tokens of the policy, {drawn} of which are there already; "
                         "give it a higher limit")
    room = slot_tokens - length
    if limit - drawn > room:
        lower = f"lower its limit to {room + drawn}, " if room > 0 else ""
        raise ValueError(f"uid {uid} may get {length} + {limit - drawn} tokens, a slot holds {slot_tokens}; {lower}shorten its "
                         "prompt, or make the engine with a larger slot_tokens")


def _whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True

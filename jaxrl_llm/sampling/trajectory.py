"""One trajectory while it is played: its contexts, and the nodes that it adds to a forest."""
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.rollouts import TRAINED, Role
from jaxrl_llm.engines.prompts import Spelled
from jaxrl_llm.engines.requests import Node, as_ints
from jaxrl_llm.environments import base


class TurnLimits(NamedTuple):
    """Maximum turns of the policy in a trajectory, and maximum tokens after its prompt.

    `announced`: the first limit of turns announced to the policy, see the knob `announced_turns`; 0: none.
    """

    turns: int
    tokens: int
    announced: int = 0

    def left(self, turns: int) -> int:
        """The number of turns left that is announced to the policy after `turns` turns."""
        return (self.announced if turns < self.announced < self.turns else self.turns) - turns


class Planted(NamedTuple):
    """Tokens that a trajectory begins with, see `topologies.acts.BeginPart`; log-probs that are unknown are NaN.

    by: the name of the writer; "": it has none.
    """

    role: int
    ids: list[int]
    logprobs: list[float]
    by: str = ""


class Waiting(NamedTuple):
    """The context of an agent while others speak, see `Trajectory`."""

    ids: list[int]
    last: int
    drawn: int
    request: int


@dataclasses.dataclass
class Trajectory:
    """A trajectory so far.

    `ids` are all tokens of the context, `prompt_ids` its first ones, `pieces` the nodes of all contexts (see `grow`), `parents`
    the index of the piece before each in its context (-1: it begins the context), `last` that of the context's last piece,
    `drawn` the policy's tokens in the context; `done`: the environment ended it. `contexts`: how many were begun.
    `limits`: those that held when it began; `most`: the problem's own limit of tokens after the prompt; None: it has none.
    `planted`: what its first turn begins with, and all of it if it `ends` there; the columns `author` i8[n] and `named`
    object[n] of a piece have the roles of its tokens and the names of their writers. `reads`: what the policy reads in place of
    the prompt; []: the prompt.
    `sampling`: numbers that replace those of the run. `version`: that of the weights in use.
    `opening` are the messages that several contexts begin with. `requests`: how often the engine had to read all ids again, and
    `request` the number of the context's own request. If contexts are those of agents, `reader` is the agent of this one, and
    `waiting` has those of the others.
    """

    ids: list[int]
    prompt: int
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    pieces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    drawn: int = 0
    turns: int = 0
    total: float = 0.0
    done: bool = False
    parents: list[int] = dataclasses.field(default_factory=list)
    last: int = -1
    contexts: int = 1
    opening: Sequence[base.Message] = ()
    requests: int = 0
    request: int = 0
    reader: int | None = None
    waiting: dict[int, "Waiting"] = dataclasses.field(default_factory=dict)
    most: int | None = None
    limits: TurnLimits = TurnLimits(1, 0)
    planted: list[Planted] = dataclasses.field(default_factory=list)
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    version: int = -1
    ends: bool = False
    reads: list[int] = dataclasses.field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """All tokens that the policy reads before its next turn."""
        return self.reads + self.ids[len(self.prompt_ids):] if self.reads else self.ids

    @property
    def writer(self) -> Role:
        """Who writes what is sampled."""
        return Role.ELSEWHERE if self.reads else Role.POLICY

    def read_by(self, role: int) -> list[int] | None:
        """What the writer of tokens of this role read in place of the prompt; None: the prompt."""
        return self.reads if role == Role.ELSEWHERE else None

    @property
    def tokens(self) -> int:
        """Maximum tokens after its prompt."""
        return self.limits.tokens if self.most is None else min(self.limits.tokens, self.most)

    @property
    def begun(self) -> list[int]:
        """The tokens that its next turn begins with: those that are planted, in the first one."""
        return [] if self.turns else [token for part in self.planted for token in part.ids]

    @property
    def behind(self) -> int:
        """Number of tokens of the context after the prompt."""
        return len(self.ids) - len(self.prompt_ids)

    @property
    def open_requests(self) -> set[int]:
        """Numbers of the requests of its contexts, which the engine holds."""
        return {self.request, *(context.request for context in self.waiting.values())}

    def begin(self) -> None:
        """Begins a new context with the prompt."""
        self.ids, self.last, self.contexts = list(self.prompt_ids), -1, self.contexts + 1
        self.ask_anew()

    def ask_anew(self) -> None:
        """Begins a new request: the engine reads all ids again, and counts its samples from 0."""
        self.drawn, self.requests = 0, self.requests + 1
        self.request = self.requests

    def hand_to(self, reader: int) -> bool:
        """Goes to the context of an agent; returns whether it is a new one."""
        if reader == self.reader:
            return False
        assert self.reader is not None
        self.waiting[self.reader] = Waiting(self.ids, self.last, self.drawn, self.request)
        self.reader, known = reader, self.waiting.pop(reader, None)
        if known is None:
            self.begin()
        else:
            self.ids, self.last, self.drawn, self.request = known
        return known is None

    def append(self, role: Role, ids: Sequence[int], text: str, **columns) -> None:
        """Appends a node."""
        self.ids += as_ints(ids)
        self.parents.append(self.last)
        self.last = len(self.pieces)
        self.pieces.append({
            "role": role, "tokens": np.asarray(ids, np.int32), "texts": text, "logprobs": np.zeros(len(ids)),
            "entropies": np.zeros(len(ids)), "version": np.full(len(ids), self.version), "turn_rewards": 0.0, "turn_info": {},
            "author": np.full(len(ids), role, np.int8), "named": np.full(len(ids), "", object), **columns})

    def add(self, reward: float) -> None:
        """Adds a reward to the policy's last turn, for a trajectory that has ended."""
        last = next(piece for piece in reversed(self.pieces) if piece["role"] in (*TRAINED, Role.HINT))
        last["turn_rewards"], self.total = last["turn_rewards"] + reward, self.total + reward

    def pop(self) -> None:
        """Removes the last node, which is one of this context."""
        piece, self.last = self.pieces.pop(), self.parents.pop()
        self.total -= piece["turn_rewards"]
        del self.ids[len(self.ids) - len(piece["tokens"]):]


def beginning(trace: Spelled, share: float, most: int, role: int = Role.EXPERT, by: str = "") -> list[Planted]:
    """The first `floor(share * tokens)` of a trace, whose last token is the end token, as parts of one author each.

    A share of 1 is all of it with the end token, or nothing if it is longer than `most`. What tools say is an environment's,
    the rest is `by` its writer.
    """
    whole = len(trace.ids) if len(trace.ids) <= most else 0
    part = int(np.floor(np.float32(share) * (len(trace.ids) - 1) + np.float32(1e-4)))
    said = np.array(trace.said[:whole if share >= 1 else min(part, most - 1)], bool)
    places = [0, *np.flatnonzero(np.diff(said)) + 1, len(said)]
    return [Planted(role, trace.ids[start:end], trace.logprobs[start:end], by) if said[start] else
            Planted(Role.ENVIRONMENT, trace.ids[start:end], trace.logprobs[start:end])
            for start, end in zip(places, places[1:]) if end > start]


def authors(planted: Sequence[Planted], length: int, rest: Role = Role.POLICY) -> np.ndarray:
    """i8[length], who wrote each token of a turn that begins with what is `planted`, as far as it goes, and who the `rest`."""
    roles = np.full(length, rest, np.int8)
    begun = np.repeat([part.role for part in planted], [len(part.ids) for part in planted])[:length]
    roles[:len(begun)] = begun
    return roles


def names(planted: Sequence[Planted], length: int) -> np.ndarray:
    """object[length], the name of who wrote each token of such a turn; "": the policy, or a writer without a name."""
    given, named = [part.by for part in planted for _ in part.ids][:length], np.full(length, "", object)
    named[:len(given)] = given
    return named


def stretches(role: np.ndarray, name: np.ndarray) -> list[tuple[int, int]]:
    """`(start, end)` of the tokens in a row that one author wrote; one stretch if there are no tokens."""
    places = [0, *(np.flatnonzero((role[1:] != role[:-1]) | (name[1:] != name[:-1])) + 1).tolist(), len(role)]
    return list(zip(places, places[1:]))


def spoken(one: Trajectory, node: Node, columns: Sequence[Column]) -> Node:
    """A turn with all that it begins with: the node of an engine, which has read the tokens before `node.start`.

    Entropies of what is planted are unknown, NaN, and `columns` have their fill.
    """
    count = 0 if one.turns else node.start - len(one.context)
    if count <= 0:
        return node
    logprobs = [number for part in one.planted for number in part.logprobs][:count]
    before = {"tokens": one.begun[:count], "logprobs": logprobs, "entropies": np.full(count, np.nan),
              "policy_version": np.full(count, one.version)}
    joined: dict[str, Any] = {name: np.concatenate([values, getattr(node, name)]).astype(getattr(node, name).dtype)
                              for name, values in before.items()}
    more = {column.name: np.concatenate([column.filled(count), node.columns[column.name]]) for column in columns}
    return dataclasses.replace(node, start=len(one.ids), columns=more, **joined)


def ended_before(one: Trajectory, uid: int, limit: int, stop_ids: Sequence[int], columns: Sequence[Column],
                 said: int | None = None) -> Node | None:
    """The turn of which nothing is left to sample; None: something is.

    What it begins with is all of it, has a stop, or reaches its limit. `said`: tokens through its first stop string; None: it
    has none.
    """
    ids, never = one.begun, limit + 1
    stop = next((n for n, token in enumerate(ids, 1) if token in stop_ids), never)
    if one.ends:
        stop, said = len(ids), None
    ends = (stop, "stop"), (never if said is None else said, "stop_string"), (limit, "limit")
    count, finish = min(ends, key=lambda end: end[0])
    if len(ids) < count or not ids:
        return None
    nothing = np.zeros(0, np.float32)
    node = Node(uid, None, len(one.context) + count, np.zeros(0, np.int32), nothing, nothing, np.zeros(0, np.int32),
                finish, {column.name: column.filled(0) for column in columns})
    return spoken(one, node, columns)

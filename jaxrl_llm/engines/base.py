"""The contract of an engine, which turns requests into nodes, and the table of those that runs name.

To add one, write a function `(run: Wanted) -> EngineKind` under `@engine(name=..., provides=...)`, in a file of this folder or
of your own, which `sampling.engine` names as "module:function".
"""
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from jaxrl_llm.data.columns import Column
from jaxrl_llm.engines.requests import Node, Request
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.tools import registry

# What an engine can, beside sampling a prompt to a stop token or a limit:
CAN = {
    "extend": "goes on with a trajectory after tokens of an environment",
    "fork": "continues the tokens of another trajectory",
    "spread": "draws the first tokens of a group together",
    "limits": "has a limit of tokens for each prompt",
    "entropies": "measures the entropy of each draw",
    "numbers": "restricts the draws of some trajectories, by top_k, top_p or min_p, beside others",
    "stop_texts": "ends a row at a stop string itself",
    "mesh": "samples on all devices of a mesh",
    "paged": "keeps caches in pages",
    "beside": "samples in a thread beside the rewards of rows that have ended",
}


class Engine(Protocol):
    """Samples trajectories. A node depends on its request, the tokens before it and the weights alone."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def computed(self) -> int:
        """Number of tokens that went through the model; 0 where it is not counted."""

    @property
    def decoded(self) -> tuple[int, ...]:
        """Number of tokens that each replica has drawn; () where it is not counted."""

    def submit(self, *requests: Request) -> None:
        """Queues trajectories: all of them, or none if one is refused (ValueError)."""

    def extend(self, uid: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """Appends tokens that the policy did not write to a trajectory, which then continues; see `CAN`."""

    def release(self, uid: int) -> None:
        """Forgets a trajectory. Raises KeyError for a uid that is not held."""

    def publish(self, version: int, params: Any, lora: Any = None) -> None:
        """Samples with these weights from now on. Raises ValueError for weights of another policy."""

    def step(self) -> bool:
        """Samples a part of what is queued and running; returns whether there was any."""

    def finished(self) -> list[Node]:
        """The nodes that ended and were not returned before."""

    def collect(self) -> list[Node]:
        """Steps until a node has ended, and returns all that have; an empty list if nothing runs or waits."""

    def written(self, uid: int) -> Node | None:
        """What the policy has written of a node that has not ended, for `Request.written`; None: nothing that is kept."""

    def rest(self) -> None:
        """Frees weights and caches until the next `publish`; an engine may keep both while it holds a trajectory."""


class Collects:
    """Nodes that have ended wait in `_done` until they are returned; `step` adds to them."""

    _done: list[Node]

    def step(self) -> bool:
        """See `Engine.step`."""
        raise NotImplementedError

    def collect(self) -> list[Node]:
        """Steps until a node has ended, and returns all that have; an empty list if nothing runs or waits."""
        while not self._done and self.step():
            pass
        return self.finished()

    def finished(self) -> list[Node]:
        """The nodes that have ended and were not returned before, without a further step."""
        nodes, self._done = self._done, []
        return nodes


class Wanted(NamedTuple):
    """What a run knows before it makes its engine.

    Attributes:
      model, tokenizer: the policy's.  mesh: that of the sampler, over all processes, see `parallel.sampler_mesh`.
      prompts, group: P and G of a batch.  parts: in how many parts it is sampled.
      prompt_tokens, max_tokens: maximum tokens of a prompt and behind it.
      stop_ids, stop_texts: what ends a message of the policy.
      wants: what the run needs of `CAN`.  programs: kinds of distributions for each length of prompts.  paged: see `Engine`.
      server: the server that samples instead of this process, or None.
      columns: names of further token columns that nodes must have.
    """

    model: Transformer
    mesh: Mesh
    tokenizer: Any
    prompts: int
    group: int
    parts: int
    prompt_tokens: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    wants: frozenset[str] = frozenset()
    programs: int = 1
    paged: bool = False
    server: Any = None
    columns: tuple[str, ...] = ()


class EngineKind(NamedTuple):
    """An engine before there are weights: `make(params, lora, version)`, what it `can` and which token columns it `provides`.

    `columns`: declarations of the further ones that its nodes have, in `Node.columns`: those that the run wants.
    `check(metrics)` raises an error for a step in which sampler and learner disagree.  `rows`: for the head of a run.
    `mesh`: devices of this process, on which it samples apart from other processes; None: all processes sample together.
    """

    name: str
    make: Callable[[Any, Any, int], Engine]
    can: frozenset[str]
    provides: frozenset[str] = frozenset()
    check: Callable[[Mapping[str, float]], None] = lambda metrics: None
    rows: tuple[tuple[str, str], ...] = ()
    columns: tuple[Column, ...] = ()
    mesh: Mesh | None = None


ENGINES = registry.PartTable("engine", EngineKind, keywords=False)  # by functions of `Wanted`; an entry provides what it can do
engine = ENGINES.enter


def lacking(name: str, can: Container[str], wanted: Mapping[str, str]) -> list[str]:
    """A line for each ability of `CAN` that a run wants and the engine of that name lacks; `wanted`: what -> what for."""
    return [f"{why} needs an engine that {CAN[what]}, and {name!r} does not; set sampling.engine='auto' and server.url='', or "
            "leave that out" for what, why in wanted.items() if what not in can]


def check_can(kind: EngineKind, wanted: Mapping[str, str]) -> None:
    """Raises ValueError with the lines of `lacking`, if there are any."""
    if lines := lacking(kind.name, kind.can, wanted):
        raise ValueError("\n".join(lines))


def check_provides(kind: EngineKind, columns: Sequence[str]) -> None:
    """Raises ValueError if an engine lacks a token column that a run wants."""
    if lacking := sorted({*columns} - {column.name for column in kind.columns}):
        raise ValueError(f"the method reads the token column {lacking[0]!r}, which engine {kind.name!r} does not provide of "
                         f"this model; it provides {', '.join(sorted(kind.provides))}. Take another engine, model or method")

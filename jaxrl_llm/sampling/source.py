"""The source of rollouts: problems in, finished rollouts out."""
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.control import Controller, knobs
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.data.shapes import Ladders, padded
from jaxrl_llm.learning.snapshot import Snapshot, check
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.stages import Stage, Unfinished
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.loader import Batches
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies import Topology
from jaxrl_llm.topologies.base import remember


@dataclasses.dataclass
class Source:
    """`next(snapshot)` makes one batch with the policy and under the knobs of a snapshot, stage by stage.

    Attributes:
      task: the task; `data` has its problems in an endless order.
      stream: grows trajectories.  topology: decides what is sampled.  stages: act on a batch, see `sampling.stages`.
      prompts: per batch.  max_tokens: maximum tokens of a completion, at most T.
      overlong: handling of prompts that are too long, see `engines.prompts.fit`.
      readers: number of processes that read `data` in turns.
      next_uid: uid of the next trajectory.  memory: what stages keep between batches, by name.
      sizes: the sizes that a batch may have, from the limits of S, T, G and groups of a prompt, and the maximum number of
        programs, see `data.shapes`.
      sets: evaluation sets beside the held-out problems of the task.
      model: the model that samples, to check snapshots; None: they are not checked.
    """

    task: Task
    data: Batches
    stream: Stream
    topology: Topology
    stages: tuple[Stage, ...]
    prompts: int
    max_tokens: int
    overlong: str = "fail"
    readers: int = 1
    next_uid: int = 0
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Callable[..., Ladders] = padded
    sets: tuple[EvalSpec, ...] = ()
    model: Transformer | None = None

    def __post_init__(self):
        self._apart: Stream | None = None
        self._one = threading.Lock()
        kept = [stage.memory for stage in self.stages if stage.memory is not None]
        self.memory = {one.name: self.memory[one.name] if one.name in self.memory else one.empty(self) for one in kept}

    def next(self, snapshot: Snapshot, timer: PhaseTimer | None = None) -> Finished:
        """One batch, as planned by its topology. It waits for the batch of another thread, which an interrupt left behind.

        Raises:
          ValueError: no prompt of many batches fits, a knob is outside its range, or the snapshot is of another model.
        """
        if self.model is not None:
            check(snapshot, self.model)
        with self._one:
            return self._next(snapshot, timer or PhaseTimer())

    def _next(self, snapshot: Snapshot, timer: PhaseTimer) -> Finished:
        """The same, with nothing beside it."""
        known = knobs.read(self.reads, snapshot.knobs, self.numbers, snapshot.setters)
        self.stream.forget()
        self.stream.publish(snapshot._replace(knobs=known))
        shown = {f"control/{name}": float(value) for name, value in known.items() if np.ndim(value) == 0}
        batch = Unfinished(self.planted([], draw=0), self.topology, snapshot, known, timer, metrics=shown)
        for stage in self.stages:
            batch = stage.begin(batch, self)
        remember(batch.topology, self.topology.memory)
        while not (plan := batch.topology.plan(batch.forest)).complete:
            batch = self.grown(batch._replace(plan=plan))
        batch = batch._replace(forest=batch.topology.finish(batch.forest))
        remember(self.topology, batch.topology.memory)
        for stage in self.stages:
            batch = stage.end(batch, self)
        self.stream.rest()
        forests_of = (batch.forest, *batch.replayed) if batch.forest.problems else ()
        rollouts, *replayed = [self._viewed(batch, forest) for forest in forests_of] or [None]
        return Finished(rollouts, batch.forest, dict(batch.metrics), dict(batch.counts), tuple(replayed))

    def _viewed(self, batch: Unfinished, forest: Forest) -> Rollouts:
        """The rollouts of a batch's forest, or of one that it replays, as all stages view them."""
        rollouts = self.view(forest, batch.snapshot.version)
        for stage in self.stages:
            rollouts = stage.view(rollouts, batch._replace(forest=forest), self)
        return rollouts

    def grown(self, batch: Unfinished) -> Unfinished:
        """The batch after all stages have acted on its plan."""
        batch = batch._replace(first=len(batch.forest.uid), drawn=None)
        for stage in self.stages:
            batch = stage.grow(batch, self)
        if batch.drawn is None:
            return batch
        joined = forests.join([batch.forest, batch.drawn]) if batch.forest.problems else batch.drawn
        return batch._replace(forest=joined, drawn=None)

    def view(self, forest: Forest, version: int, group: int | None = None) -> Rollouts:
        """The credited view: a rollout for each trajectory, or each of its contexts, in a shape that the run compiles for.

        `group`: maximum number of rollouts of a prompt; None: that of a complete batch.
        """
        sizes, view = self.ladders, forests.paths if self.stream.contexts == 1 else forests.contexts
        return view(
            forest, self.stream.turns, self.stream.facts, group=group or self.most, prompts=self.prompts, version=version,
            tokens=functools.partial(smallest, sizes.tokens),
            prompt_tokens=functools.partial(smallest, sizes.prompt_tokens), of_problems=self.task.facts)

    def planted(self, rows: Sequence[tuple[Problem, list[int]]], draw: int) -> Forest:
        """The forest of these problems and their token ids, without samples."""
        return self.stream.partner.plant([problem for problem, _ in rows], [ids for _, ids in rows], draw)

    # --- position and sizes -------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The position of the source; a checkpoint stores its `jsonable` form."""
        kept = {} if self.topology.memory is None else {"topology": copy.deepcopy(self.topology.memory)}
        return {"data": self.data.get_state(), "next_uid": self.next_uid, **kept, **self.memory}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Continues from this position, or from its `jsonable` form."""
        self.data.set_state(position["data"])
        self.next_uid = position["next_uid"]
        remember(self.topology, copy.deepcopy(position.get("topology")))
        for one in [stage.memory for stage in self.stages if stage.memory is not None]:
            if (stored := position.get(one.name)) is not None:
                self.memory[one.name] = stored if isinstance(stored, Forest) else one.decode(stored, self)

    @property
    def most(self) -> int:
        """Maximum number of rollouts of a prompt in a view: trajectories times their contexts."""
        return (self.topology.most or self.stream.group) * self.stream.contexts

    @property
    def ladders(self) -> Ladders:
        """The sizes that a batch may have."""
        group = self.stream.group
        return self.sizes(self.stream.prompt_tokens, self.max_tokens, group, -(-self.most // group))

    @property
    def reads(self) -> tuple[Knob, ...]:
        """The knobs that sampling and the stages read."""
        return (*self.stream.reads, *(knob for stage in self.stages for knob in stage.reads))

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers by whose names knobs give shapes and ranges."""
        problems = len(self.task.train)
        return {"N": problems, "last": problems - 1, "T": self.max_tokens}

    @property
    def controllers(self) -> dict[str, Controller]:
        """The controllers that learn for stages, by name."""
        return {name: one for stage in self.stages for name, one in stage.controllers.items()}

    @property
    def held_out(self) -> Stream:
        """A stream for held-out problems, which shares no mutable state with that of training."""
        if self._apart is None:
            self._apart = self.stream.apart()
        return self._apart


def jsonable(position: dict[str, Any]) -> dict[str, Any]:
    """The position of a source as JSON."""
    return {name: buffers.encode(part) if isinstance(part, Forest) else part for name, part in position.items()}

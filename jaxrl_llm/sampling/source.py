"""The source of rollouts: problems in, finished rollouts out."""
import dataclasses
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.control import knobs
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.snapshot import Snapshot, check
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.sampling import beside
from jaxrl_llm.sampling import position as positions
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.stages import Stage, Unfinished, moments
from jaxrl_llm.sampling.stages.base import policy_tokens
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.sampling.views import Views
from jaxrl_llm.tasks.loader import Batches
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies.base import remember


@dataclasses.dataclass(kw_only=True)
class Source(Views):
    """`next(snapshot)` makes one batch with the policy and under the knobs of a snapshot, stage by stage.

    Attributes:
      data: the problems of the task in an endless order.  stages: act on a batch, see `sampling.stages`.
      overlong: handling of prompts that are too long, see `engines.prompts.fit`.
      readers: number of processes that read `data` in turns.
      next_uid: uid of the next trajectory.  memory: what stages keep between batches, by name.
      sets: evaluation sets beside the held-out problems of the task.
      model: the model that samples, to check snapshots; None: they are not checked.
    """

    data: Batches
    stages: tuple[Stage, ...]
    overlong: str = "fail"
    readers: int = 1
    next_uid: int = 0
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    sets: tuple[EvalSpec, ...] = ()
    model: Transformer | None = None

    def __post_init__(self):
        self._apart: Stream | None = None
        self._one = threading.Lock()
        self.memory = moments.memory(self)
        moments.check(self)

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
        read = itertools.chain.from_iterable(moments.reads(self).values())
        known = knobs.read(read, snapshot.knobs, self.numbers, snapshot.setters)
        shown = {f"control/{name}": float(value) for name, value in known.items() if np.ndim(value) == 0}
        self.stream.forget()
        self.stream.publish(snapshot._replace(knobs=known))
        batch = Unfinished(self.planted([], draw=0), self.topology, snapshot, known, timer, metrics=shown)
        batch = moments.begun(batch, self)
        remember(batch.topology, self.topology.memory)
        while not (plan := batch.topology.plan(batch.forest)).complete:
            batch = moments.grown(batch._replace(plan=plan), self)
        finished = batch.topology.finish(batch.forest)
        dropped = policy_tokens(batch.forest) - policy_tokens(finished)  # sampled all the same
        batch = batch._replace(forest=finished, beside=batch.beside + max(dropped, 0))
        remember(self.topology, batch.topology.memory)
        batch = moments.ended(batch, self)
        self.stream.rest()
        forests = (batch.forest, *batch.replayed) if batch.forest.problems else ()
        rollouts, *replayed = [moments.viewed(batch, forest, self) for forest in forests] or [None]
        return Finished(rollouts, batch.forest, dict(batch.metrics), dict(batch.counts), tuple(replayed))

    def position(self) -> dict[str, Any]:
        """The position of the source; a checkpoint stores its `jsonable` form."""
        return positions.position(self, self.topology)

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Continues from this position, or from its `jsonable` form."""
        positions.continued(self, self.topology, position)

    def held_out_texts(self, version: int) -> list[Rollouts]:
        """Batches of held-out texts, whose loss evaluations measure; there are none without texts beside the prompts."""
        return [beside.rollouts(part, self, version) for part in self.beside.held_out]

    @property
    def of_texts(self) -> dict[str, int]:
        """The keys of a configuration that given texts change in its batches, with their values."""
        if not self.beside.count:
            return {}
        S, T = (sizes[-1] for sizes in self.ladders[:2])
        return {"prompts.per_step": self.prompts + self.beside.count, "prompts.max_tokens": S, "sampling.max_tokens": T}

    @property
    def told(self) -> list[tuple[str, str]]:
        """Rows for the head of a run."""
        return [*self.stream.kind.rows, *self.beside.told]

    @property
    def held_out(self) -> Stream:
        """A stream for held-out problems, which shares no mutable state with that of training."""
        if self._apart is None:
            self._apart = self.stream.apart()
        return self._apart

"""The interface of a stage: one idea in the making of a batch of rollouts.

A source runs its stages in their order at four moments: all `begin` before anything is planned, all `grow` after each plan of
the topology, all `end` once the plan is complete, and all `view` on the rollouts that the batch becomes. To add a stage, write
a function that returns a `Stage` into a new file, and name it, `--config.stages="my_module:shorter"`, or put it into a source,
`dataclasses.replace(source, stages=(*source.stages, shorter()))`:

    def shorter(*, most: float = 1.0) -> Stage:
        def grow(batch, source):
            rewards, ends = batch.forest.rewards.copy(), batch.new_ends
            rewards[ends] -= np.minimum(batch.knobs["token_cost"] * batch.forest.length[ends], most)
            return batch._replace(forest=batch.forest.with_columns(rewards=rewards))

        return Stage("shorter", grow=grow, reads=(Knob("token_cost", least=0, doc="f32[], the cost of a token"),))

A run makes a stage by itself, without arguments, if its method or a recorder needs a field of rollouts that the stage provides,
and a decorator says so: `@stage(provides=("moods",))`.
"""
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.control import Controller
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import SAMPLED, Role, Rollouts
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.loader import Batches
from jaxrl_llm.tools.registry import PartTable
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies import Plan, Topology

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Unfinished(NamedTuple):
    """A batch in the making: it grows by plans until it is `Finished`.

    Attributes:
      forest: what is drawn and sampled so far.
      topology: decides what is sampled next and what is trained on.
      snapshot: what the batch is sampled with.
      knobs: the values of controllers on the host, by name; a knob that nothing sets is absent.
      timer: of the phases of the step.
      plan: the topology's newest one.
      first: number of nodes before this plan; later nodes are new.
      drawn: problems that this plan draws, with their facts; they join the forest after all stages.
      replayed: stored groups that are learned from in updates of their own; `view` sees each of them as the `forest`.
      beside: tokens that were sampled for measurements alone.
      measuring: whether what is sampled now is for a measurement, of which an environment may lose all.
      metrics, counts: those of `Finished`.
      notes: what stages keep from one moment to the next, by their names.
    """

    forest: Forest
    topology: Topology
    snapshot: Snapshot
    knobs: Mapping[str, Any]
    timer: PhaseTimer
    plan: Plan = Plan()
    first: int = 0
    drawn: Forest | None = None
    replayed: tuple[Forest, ...] = ()
    beside: int = 0
    measuring: bool = False
    metrics: Mapping[str, float] = NOTHING
    counts: Mapping[str, np.ndarray] = NOTHING
    notes: Mapping[str, Any] = NOTHING

    @property
    def new_ends(self) -> np.ndarray:
        """i64[R], last nodes of the trajectories that this plan sampled."""
        return self.forest.ends[self.forest.ends >= self.first]

    def measured(self, metrics: Mapping[str, float] = NOTHING, counts: Mapping[str, np.ndarray] = NOTHING) -> "Unfinished":
        """The batch with these further metrics and counts."""
        return self._replace(metrics={**self.metrics, **metrics}, counts={**self.counts, **counts})

    def noted(self, name: str, note: Any) -> "Unfinished":
        """The batch with this note of a stage."""
        return self._replace(notes={**self.notes, name: note})


class Origin(Protocol):
    """What stages see of their source, see `sampling.source.Source`."""

    task: Task
    data: Batches
    stream: Stream
    prompts: int
    overlong: str
    readers: int
    next_uid: int
    memory: dict[str, Any]

    @property
    def stages(self) -> "tuple[Stage, ...]":
        """The stages of the source."""

    def planted(self, rows: Any, draw: int) -> Forest:
        """The forest of these problems and their token ids, without samples."""

    def view(self, forest: Forest, version: int, group: int | None = None) -> Rollouts:
        """The rollouts of a forest."""

    @property
    def most(self) -> int:
        """Maximum number of rollouts of a prompt."""


class StageMemory(NamedTuple):
    """What a stage keeps between batches, `source.memory[name]`; a checkpoint stores it with the position of the source.

    `empty(source)`: before the first batch. `decode(stored, source)`: from the form of `position.jsonable`.
    """

    name: str
    empty: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


def _same(batch: Unfinished, source: Origin) -> Unfinished:
    return batch


def _as_is(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
    return rollouts


class Stage(NamedTuple):
    """One idea in the making of a batch; see the top of this file for its four moments.

    Attributes:
      begin, grow, end: `(batch, source) -> batch`.  view: `(rollouts, batch, source) -> rollouts`.
      reads: the knobs that it reads from `batch.knobs`.
      needs: columns and facts of forests, or facts about turns, that it reads.
      provides: facts of forests, or extras of rollouts, that it adds.
      memory: what it keeps between batches; None: nothing.
      controllers: controllers that learn for it from each step, by name.
    """

    name: str
    begin: Callable[[Unfinished, Any], Unfinished] = _same
    grow: Callable[[Unfinished, Any], Unfinished] = _same
    end: Callable[[Unfinished, Any], Unfinished] = _same
    view: Callable[[Rollouts, Unfinished, Any], Rollouts] = _as_is
    reads: tuple[Knob, ...] = ()
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    memory: StageMemory | None = None
    controllers: Mapping[str, Controller] = NOTHING


STAGES = PartTable("stage", Stage)
stage = STAGES.enter


def policy_tokens(forest: Forest) -> int:
    """Number of tokens that the policy wrote."""
    return int(forest.length[np.isin(forest.role, SAMPLED)].sum())


def means(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """f32[count], the mean of the `values` f[R] that each of `count` owners has; NaN where it has none.

    An environment may lose all trajectories of a problem.
    """
    number = np.bincount(owner, minlength=count)
    total = np.bincount(owner, values, minlength=count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)


def placed(forest: Forest, ends: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The `values [R]` of the rows `ends` as a view of this `shape` has them: missing prompts are copies of the first."""
    owner, out = forest.prompt[ends], np.zeros(shape, values.dtype)
    out[owner, np.arange(len(ends)) - np.searchsorted(owner, owner)] = values
    out[len(forest.problems):] = out[:1]
    return out


def roles_of(rollouts: Rollouts) -> np.ndarray:
    """i8[P, G, T], who wrote each token; in a batch without roles, the policy.

    A run in which others write some batches has roles in all of them: one program serves both.
    """
    role = np.where(rollouts.mask, Role.POLICY, Role.PADDING) if rollouts.role is None else rollouts.role
    return np.asarray(role, np.int8)


def with_extras(rollouts: Rollouts, **extras: Any) -> Rollouts:
    """The rollouts with these further extras."""
    return rollouts.replace(extras={**rollouts.extras, **extras})


Rows = list[tuple[Problem, list[int]]]  # problems and their token ids

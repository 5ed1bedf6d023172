"""The interface of a topology.

To add one, write a function that returns a `Topology` into a new file:

    def twice(prompts: int, group: int) -> Topology:
        def plan(forest):
            if not forest.problems:
                return Plan(draw=prompts)
            return Plan(rows=np.flatnonzero(asked(forest) < 2 * group))

        return Topology(plan, everyone, max_groups=2)

A `Source` takes it directly: `dataclasses.replace(source, topology=twice(prompts=4, group=8))`. The learner of a run expects
the `max_groups` of its source: if they change, make a new learner for the new source (`training.setup.make_learner`).
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.forest import Forest

NO_ROWS = np.zeros(0, np.int32)

# Measurements of the prompts that a plan can request, as facts of the forest.
MEASURED = {"gradient_norms": "f32[P], mean norm of the gradient of a right completion's log-prob, 0 without any right one"}


class Plan(NamedTuple):
    """The next samples. `draw`: the number of problems to draw from the task. `rows` i32[R]: prompts that get a group each.

    A prompt that comes twice in `rows` gets two groups. `shares` f32[R, G]: the share of the problem's solution that each
    completion begins with; None: the policy writes all completions alone. `measure`: a requested fact of `MEASURED`. A plan
    without any of these marks the batch as complete.
    """

    draw: int = 0
    rows: np.ndarray = NO_ROWS
    shares: np.ndarray | None = None
    measure: str = ""

    @property
    def complete(self) -> bool:
        """Whether the batch is complete."""
        return not self.draw and not len(self.rows) and not self.measure


class Topology(NamedTuple):
    """`plan(forest) -> Plan`, the next samples; `choose(forest) -> bool[P]`, the prompts of a complete batch to train on.

    `max_groups`: the maximum number of groups of a prompt. `metrics(forest) -> numbers by name`, of a complete batch.
    """

    plan: Callable[[Forest], Plan]
    choose: Callable[[Forest], np.ndarray]
    max_groups: int = 1
    metrics: Callable[[Forest], dict[str, float]] = lambda forest: {}


def everyone(forest: Forest) -> np.ndarray:
    """bool[P], all True."""
    return np.ones(len(forest.problems), bool)


def group_sizes(forest: Forest) -> np.ndarray:
    """i64[P], trajectories of each prompt."""
    return np.bincount(forest.prompt[forest.ends], minlength=len(forest.problems))


def asked(forest: Forest) -> np.ndarray:
    """i64[P], trajectories that were requested of each prompt, with those that an environment lost: plans count these."""
    return group_sizes(forest) + forest.lost


def groups_of(most: int, group: int, why: str) -> int:
    """The number of groups in `most` completions; ValueError, with the reason `why`, if `most` is not a multiple."""
    if most % group:
        raise ValueError(f"sampling.max_group={most} is no multiple of sampling.group={group}: {why}")
    return most // group


def drawn_at_once(prompts: int, counts: Callable[[Forest], np.ndarray], choose: Callable[[Forest], np.ndarray],
                  max_groups: int) -> Topology:
    """`prompts` problems; once all are drawn, each gets the number of groups given by `counts(forest) -> i64[P]`."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        if asked(forest).any():
            return Plan()
        return Plan(rows=np.repeat(np.arange(len(forest.problems)), counts(forest)))

    return Topology(plan, choose, max_groups=max_groups)

"""Acts: what a plan asks of the stream of trajectories.

    Begin(at=3, count=5)                                             # five trajectories at prompt 3
    Begin(at=3, parts=(BeginPart(Role.EXPERT, FromTrace(1, 0.5)),))  # half of the problem's second trace comes first
    Begin(at=3, parts=(BeginPart(Role.HINT, "Primes? "),), limit=9)  # the policy goes on after a text, to nine tokens
    Begin(at=3, parts=(BeginPart(Role.EXPERT, ids),), ends=True)     # an expert's text alone, nothing is sampled
    Begin(at=3, count=8, reads=hinted)                               # the policy reads a problem with a hint instead
    Begin(at=Problem(words, "42", -1), count=8)                      # at a problem that the topology made
    groups(prompts, 8)                                               # eight at each of these prompts
"""
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import registry

PLANTED = (Role.POLICY, Role.ENVIRONMENT, Role.HINT, Role.EXPERT, Role.ELSEWHERE)  # who may write what a trajectory begins with
WRITERS = ("policy",)  # who may write the rest


class FromTrace(NamedTuple):
    """The first `share` of trace `number` of the problem, see `tasks.traces`: 1 is all of it, with its end token.

    What tools say in a trace has the role ENVIRONMENT. An environment that has an oracle, and no trace of the problem, asks the
    oracle.
    """

    number: int = 0
    share: float = 1.0


class BeginPart(NamedTuple):
    """Tokens that are planted in a trajectory before sampling goes on, as the beginning of its first turn.

    role: one of `PLANTED`; those of `rollouts.TRAINED` are trained on.  what: token ids, a text, or a part of a trace, which
    has its own log-probs and writer.  logprobs: f32[n] of the distribution that the ids were drawn from; None: they are
    unknown, NaN in the forest, and count as the learner's old ones.  by: the name of its writer, such as that of a teacher,
    which the forest and metrics have; "": it has none.
    """

    role: int
    what: Sequence[int] | str | FromTrace
    logprobs: Sequence[float] | None = None
    by: str = ""


@dataclasses.dataclass(frozen=True)
class Begin:
    """Begins `count` trajectories at a prompt, neither more nor fewer.

    at: the prompt, a row of the forest; or a problem that the topology made, with an id below 0, which joins the forest first.
      Acts at equal problems share a row. Where the prompt of such a problem does not fit, its trajectories count as lost.
    parts: what each of them begins with.
    limit: maximum tokens after the prompt, at most that of the run; None: that of the run.
    ends: whether the parts are all of it: nothing is sampled, and an environment answers one turn. It ends by itself, unless
      the limit cuts it.
    reads: what the writer of the rest reads in place of the prompt, a problem with another prompt, or token ids; (): the
      prompt. The trajectory lies under the prompt all the same, and what the policy writes has the role ELSEWHERE, as parts
      have that it wrote under this text before. `Topology.reads` declares how long it may be; where a problem's prompt does
      not fit, the trajectories count as lost.
    by: who writes the rest, one of `WRITERS`.
    sampling: numbers that replace the run's `Sampling`, such as {"temperature": 0.7}; the topology declares those that the run
      may lack, `Topology(..., numbers=("top_k",))`.

    Raises ValueError with all numbers and roles that cannot be.
    """

    at: int | Problem
    count: int = 1
    parts: tuple[BeginPart, ...] = ()
    limit: int | None = None
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ends: bool = False
    reads: Sequence[int] | Problem = ()
    by: str = "policy"

    def __post_init__(self):
        made = isinstance(self.at, Problem)
        faults = [f"{name}={value!r}; give a whole number, {least} or more" for name, value, least in (
            ("at", 0 if made else self.at, 0), ("count", self.count, 0), ("limit", 1 if self.limit is None else self.limit, 1))
                  if not isinstance(value, int | np.integer) or value < least]
        if made and self.at.id >= 0:
            faults.append(f"the problem has the id {self.at.id}, which is that of a problem of the task; give it an id below 0")
        faults += [f"a part has the role {part[0]!r}; give {', '.join(role.name for role in PLANTED)}" for part in self.parts
                   if part[0] not in PLANTED]
        if not (isinstance(self.reads, Problem) or len(self.reads)) and any(part[0] == Role.ELSEWHERE for part in self.parts):
            faults.append("a part has the role ELSEWHERE, and reads are empty; give the text under which the policy wrote it")
        if self.ends and not self.parts:
            faults.append("ends=True without parts; give the parts that are all of it, or leave ends out")
        if self.by not in WRITERS:
            faults.append(str(registry.unknown("writer of the rest", self.by, WRITERS)))
        if faults:
            where = "a problem that a topology made" if made else f"prompt {self.at!r}"
            raise ValueError(f"Begin at {where}: {'. '.join(faults)}")

    @property
    def row(self) -> int:
        """The row of its prompt; ValueError for a problem that has not joined the forest."""
        if isinstance(self.at, Problem):
            raise ValueError(f"Begin at the problem {str(self.at.prompt)[:80]!r}, which is in no forest yet; let a plan have "
                             "the act, or give a row of the forest")
        return self.at

    @property
    def read_ids(self) -> Sequence[int]:
        """The token ids of `reads`; ValueError for a problem that is not encoded."""
        if isinstance(self.reads, Problem):
            raise ValueError(f"Begin reads the problem {str(self.reads.prompt)[:80]!r}, whose prompt is not encoded; let a "
                             "plan have the act, or give token ids")
        return self.reads


class Stop(NamedTuple):
    """Ends a trajectory that grows: with what is there of it (`keep`), or without a trace.

    One of which nothing is sampled yet leaves nothing, whatever it begins with.
    `Stream.apply` takes it between two parts of a batch; plans are made while nothing grows.
    """

    uid: int
    keep: bool = True


Act = Begin | Stop


def groups(prompts: Sequence[int] | np.ndarray, count: int | np.ndarray) -> tuple[Begin, ...]:
    """`count` trajectories at each of the prompts, one number for all or one for each; none where it is 0."""
    pairs = zip(np.asarray(prompts).tolist(), np.broadcast_to(count, np.shape(prompts)).tolist(), strict=True)
    return tuple(Begin(prompt, number) for prompt, number in pairs if number > 0)


def limited(acts: Sequence[Act], limits: np.ndarray) -> list[Act]:
    """The acts with at most `limits` i32[P] tokens after each prompt."""
    return [dataclasses.replace(act, limit=int(min(limits[act.row], limits[act.row] if act.limit is None else act.limit)))
            if isinstance(act, Begin) else act for act in acts]


def numbered(acts: Sequence[Act], first: int, group: int) -> tuple[list[tuple[Begin, range]], int]:
    """The uids of each `Begin`, from `first` on, and the uid after them.

    A block of uids, those with the same `uid // group`, is of one prompt: acts at one prompt that follow each other go on in
    its blocks, and the next prompt begins a new one. Processes share out blocks by their numbers.
    """
    found, next_uid = list[tuple[Begin, range]](), -(-first // group) * group
    for _, some in itertools.groupby((act for act in acts if isinstance(act, Begin)), key=lambda act: act.row):
        for act in some:
            found.append((act, range(next_uid, next_uid + act.count)))
            next_uid += act.count
        next_uid = -(-next_uid // group) * group
    return found, next_uid

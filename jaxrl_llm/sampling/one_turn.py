"""A task as the partner of a policy: one turn of each trajectory, scored after sampling, many at a time."""
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import Forest, grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.prompts import encode_problems, spelled
from jaxrl_llm.engines.requests import Node
from jaxrl_llm.rewards import ByTask, Combined
from jaxrl_llm.sampling.scoring import cut_and_spelled, scores_of, shared_scores
from jaxrl_llm.sampling.trajectory import Planted, Trajectory, TurnLimits, authors, beginning, names, stretches
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import trace_of
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies.acts import FromTrace


class _Scored(NamedTuple):
    """A trajectory that has ended: its node, the tokens that are kept of it, its text and its scores."""

    node: Node
    kept: int
    stopped: bool
    text: str
    total: float
    components: np.ndarray


class _Batch:
    """Trajectories that are scored as one batch, the completions of a prompt one after another.

    uids, problems: [R].  scored: how many have a score.  spent: seconds of each of their rewards so far.
    """

    def __init__(self, uids: list[int], problems: list[Problem]):
        self.uids, self.problems, self.scored = uids, problems, 0
        self.spent: Any = 0.0

    def remove(self, uid: int) -> None:
        """Leaves a trajectory out."""
        place = self.uids.index(uid)
        del self.uids[place], self.problems[place]
        self.scored -= place < self.scored


@dataclasses.dataclass(eq=False)
class OneTurn:
    """Scores one turn of each trajectory by a reward: a prompt is a task's, and the answer to the policy is the end.

    Batches of `prompts` blocks of up to `group` trajectories of a prompt (see `topologies.acts.numbered`) are scored in the
    order in which they begin; blocks that have ended are scored while the others are sampled, unless the reward sees the whole
    batch at once.

    Attributes:
      reward: turns texts into scores.
      tokenizer, stop_strings: these turn tokens into texts.
      prompts, group: P and G of a batch.  max_tokens: T.
      columns: the further token columns that nodes have.
      alone: whether this process scores its own trajectories, and others theirs; otherwise all know all and share the work.
    """

    reward: Combined | ByTask
    tokenizer: Any
    prompts: int
    group: int
    max_tokens: int
    stop_strings: Sequence[str] = ()
    columns: tuple[Column, ...] = ()
    alone: bool = False
    turns: ClassVar[int] = 1
    contexts: ClassVar[int] = 1
    facts: ClassVar[Mapping[str, str]] = {}
    goes_on: ClassVar[bool] = False
    limited: ClassVar[bool] = False
    by_uid: ClassVar[bool] = False
    busy: ClassVar[bool] = False
    runner: ClassVar[None] = None

    def __post_init__(self):
        self._batches: list[_Batch] = []
        self._nodes: dict[int, Node] = {}
        self._going: dict[int, Trajectory] = {}
        self._scored: dict[int, _Scored] = {}
        self._failures: Counter = Counter()

    @property
    def extract(self) -> Callable[[str, Problem], Any] | None:
        """The answer that the first reward reads in a text, or None if it reads no answers."""
        return self.reward.extract if self.reward.extracts else None

    def prepare(self, waits: bool) -> list[tuple[str, str]]:
        """The rewards that score completions and how, and whether they wait for the last row."""
        rows = [(f"reward {name}", how) for name, how in self.reward.prepare()]
        if self.reward.timed and self.reward.by_row and waits:
            rows.append(("rewards begin", "after the last completion; with sampling.micro_batches=2 after the first half"))
        return rows

    def encode(self, problems: Sequence[Problem], tokenizer, timer: PhaseTimer | None = None) -> list[list[int] | None]:
        """Token ids of prompts."""
        return list(encode_problems(problems, tokenizer))

    def plant(self, problems: Sequence[Problem], ids: Sequence[Sequence[int]], draw: int) -> Forest:
        """The forest of these prompts, to grow completions on."""
        return plant(problems, ids, self.reward.names, answers=self.reward.extracts, draw=draw,
                     solved_above=self.reward.solved_above, columns=self.columns)

    def limits(self, max_tokens: int | None, max_turns: int | None, announced: int | None) -> TurnLimits:
        """The limit of a completion. Raises ValueError for numbers of turns, which only environments have."""
        for name, value in (("max_turns", max_turns), ("announced_turns", announced)):
            if value is not None:
                raise ValueError(f"a controller sets {name}={value}, and completions have one turn; set config.environment")
        return TurnLimits(1, self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens))

    def limit(self, one: Trajectory) -> int:
        """Maximum tokens of a completion."""
        return one.tokens

    def begin(self, going: Mapping[int, Trajectory], problems: Sequence[Problem], timer: PhaseTimer) -> dict[int, Trajectory]:
        """All trajectories: a prompt is known before it is sampled."""
        for part in self._parted(going):
            self._batches.append(_Batch(part, [problems[going[uid].prompt] for uid in part]))
        self._going |= going
        return dict(going)

    def hear(self, nodes: Mapping[int, Node], wait: bool, timer: PhaseTimer) -> dict[int, list[int] | None]:
        """Ends these trajectories, and scores the batches in which prompts have all of their completions."""
        self._nodes |= nodes
        while self._batches:
            batch, ended = self._batches[0], self._ended(self._batches[0])
            if ended:
                with timer("reward"):
                    self._score(batch, ended)
            if not ended and batch.scored < len(batch.uids):
                break
            if batch.scored == len(batch.uids):
                self._batches.pop(0)
        return dict.fromkeys(nodes)

    def _ended(self, batch: _Batch) -> int:
        """How many trajectories of a batch, whole blocks of them, can be scored next."""
        left = batch.uids[batch.scored:]
        ended = next((n for n, uid in enumerate(left) if uid not in self._nodes), len(left))
        while 0 < ended < len(left) and left[ended - 1] // self.group == left[ended] // self.group:
            ended -= 1
        return ended if self.reward.by_row or ended == len(left) and not self.alone else 0

    def _parted(self, uids: Iterable[int]) -> list[list[int]]:
        """The trajectories of each batch."""
        blocks = [list(block) for _, block in itertools.groupby(uids, key=lambda uid: uid // self.group)]
        return [list(itertools.chain(*blocks[first:first + self.prompts])) for first in range(0, len(blocks), self.prompts)]

    def _score(self, batch: _Batch, count: int) -> None:
        """Scores the next `count` trajectories of a batch."""
        left = len(batch.uids) - batch.scored
        part = slice(batch.scored, batch.scored + count)
        uids, problems = batch.uids[part], batch.problems[part]
        nodes = [self._nodes.pop(uid) for uid in uids]
        kept, stopped, texts = cut_and_spelled([node.tokens for node in nodes], self.tokenizer, self.stop_strings)
        score = scores_of if self.alone and self.reward.by_row else shared_scores
        scores = score(self.reward.part(count / left), texts, problems, kept, batch.spent)
        batch.scored, batch.spent = batch.scored + count, batch.spent + scores.seconds
        self._failures.update(scores.failures)
        for i, (uid, node) in enumerate(zip(uids, nodes)):
            self._scored[uid] = _Scored(node, int(kept[i]), bool(stopped[i]) or node.finish == "stop", texts[i],
                                        scores.total[i], scores.components[i])

    def _score_together(self, forest: Forest, begun: Mapping[int, int]) -> None:
        """Scores the batches of all processes as one process does, for rewards that see the whole of a batch."""
        mine = {uid: (row, self._nodes.pop(uid)) for uid, row in begun.items()}
        ended = {uid: one for part in parallel.gather_objects(mine) for uid, one in part.items()}
        for part in self._parted(sorted(ended)):
            self._nodes |= {uid: ended[uid][1] for uid in part}
            self._score(_Batch(part, [forest.problems[ended[uid][0]] for uid in part]), len(part))
        self._batches, self._scored = [], {uid: self._scored[uid] for uid in begun}
        if not parallel.is_primary():  # all have counted them
            self._failures.clear()

    def answers(self, uid: int) -> bool:
        """Whether the trajectory has ended."""
        return uid in self._nodes or uid in self._scored

    def cut(self, uid: int, written: Node | None, timer: PhaseTimer) -> bool:
        """Ends a trajectory behind what is written of it; False if nothing is."""
        if written is not None and len(written.tokens):
            self.hear({uid: written}, False, timer)
        return uid in self._nodes or uid in self._scored

    def forget(self, uid: int) -> None:
        """Leaves a trajectory out of its batch."""
        for known in (self._going, self._nodes, self._scored):
            known.pop(uid, None)
        for batch in self._batches:
            if uid in batch.uids:
                batch.remove(uid)
        self._batches = [batch for batch in self._batches if batch.uids]
        self.hear({}, False, PhaseTimer())

    def memory(self, uid: int) -> tuple[Node | None]:
        """The node of the trajectory, if it has ended."""
        return (self._scored[uid].node if uid in self._scored else self._nodes.get(uid),)

    def resume(self, going: Mapping[int, Trajectory], memories: Mapping[int, tuple[Node | None]], problems: Sequence[Problem]
               ) -> set[int]:
        """Scores those that have ended again, in the same batches; none is lost."""
        self.begin(going, problems, PhaseTimer())
        self.hear({uid: node for uid, (node,) in memories.items() if node is not None}, False, PhaseTimer())
        return set()

    def grown(self, forest: Forest, begun: Mapping[int, int], computed: int) -> Forest:
        """The forest with these completions; what was planted in one are nodes before the policy's."""
        if self.alone and not self.reward.by_row:
            self._score_together(forest, begun)
        scored = [self._scored.pop(uid) for uid in begun]
        uids, owners = np.array([*begun], np.int64), np.array([*begun.values()], np.int64)
        lengths = np.array([one.kept for one in scored], np.int64)
        going = [self._going.pop(uid) for uid in begun]
        wrote = [(authors(one.planted, n, one.writer), names(one.planted, n)) for one, n in zip(going, lengths.tolist())]
        node = by_author(wrote)
        row, last = node.row, node.last
        roots = np.flatnonzero(forest.role == Role.PROMPT)
        above = np.where(node.first, roots[owners[row]], len(forest.uid) + np.arange(len(row)) - 1)
        components = np.array([one.components for one in scored], np.float32).reshape(len(scored), len(forest.names))
        ends = [(scored[i], end) for i, end in zip(row, last)]
        columns = {
            "prompt": owners[row], "role": node.role, "length": node.length,
            "stopped": np.array([one.stopped and end for one, end in ends], bool),
            "rewards": np.array([one.total if end else 0 for one, end in ends], np.float32),
            "components": np.where(last[:, None], components[row], 0),
            "reads": [going[i].read_by(role) for i, role in zip(row, node.role)], "writer": node.writer,
            "texts": [one.text if end else "" for one, end in ends],
            "answers": [self.reward.extract(one.text, forest.problems[owners[i]]) if end else None
                        for i, (one, end) in zip(row, ends)]}
        for name, of_node in (("tokens", "tokens"), ("logprobs", "logprobs"), ("entropies", "entropies"),
                              ("version", "policy_version")):
            columns[name] = np.concatenate([getattr(one.node, of_node)[:one.kept] for one in scored] or [np.zeros(0)])
        for more in self.columns:
            columns[more.name] = np.concatenate([more.filled(0), *(one.node.columns[more.name][:one.kept] for one in scored)])
        failures, self._failures = self._failures, Counter()
        return grow(forest, above, uids[row], columns, computed=computed, failures=failures)

    def check(self, forest: Forest) -> None:
        """Does nothing: no completion is lost."""

    def beginning(self, problem: Problem, uid: int, role: int, what: FromTrace) -> list[Planted]:
        """The first tokens of a trace of the problem."""
        trace = trace_of(problem, what.number)
        return beginning(spelled(trace, problem, self.tokenizer), what.share, self.max_tokens, role, trace.writer)

    def demonstrated(self, problems: Sequence[Problem], strays: float = 0.0) -> Forest:
        """Raises NotImplementedError: `warmup.imitate` shows the solutions of a task."""
        raise NotImplementedError("a task has solutions to imitate, and no oracle")

    def rest(self) -> None:
        """Does nothing: no completion is lost."""

    def drop(self) -> None:
        """Forgets all completions."""
        self.__post_init__()

    def scoring(self, reward: Combined | ByTask) -> "OneTurn":
        """A partner apart whose completions this reward scores."""
        return dataclasses.replace(self, reward=reward)

    def apart(self) -> "OneTurn":
        """The same task, with batches of its own."""
        return dataclasses.replace(self)


class Written(NamedTuple):
    """The nodes of completions with several authors, one row after another.

    row: i64[N], the completion.  role: i8[N].  length: i64[N].  first, last: bool[N], the first and the last node of the row.
    writer: object[N], its name, "" without one.
    """

    row: np.ndarray
    role: np.ndarray
    length: np.ndarray
    first: np.ndarray
    last: np.ndarray
    writer: np.ndarray


def by_author(wrote: Sequence[tuple[np.ndarray, np.ndarray]]) -> Written:
    """The nodes of completions, of which `wrote` has the roles i8[n] of all tokens and the names object[n] of their writers.

    A node has one author. A completion without tokens is one node of the policy.
    """
    runs = [(row, int(role[start]) if len(role) else Role.POLICY, end - start) for row, (role, name) in enumerate(wrote)
            for start, end in stretches(role, name)]
    named = [name[start] if len(name) else "" for role, name in wrote for start, _ in stretches(role, name)]
    row, role, length = np.array(runs, np.int64).reshape(-1, 3).T
    new = np.append(True, row[1:] != row[:-1])[:len(row)]
    last = np.append(row[1:] != row[:-1], True)[:len(row)]
    return Written(row, role.astype(np.int8), length, new, last, np.array(named, object))

"""The stream of a run: one engine, the trajectories that grow in it, and the partner that answers and rewards them."""
import copy
import dataclasses
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.control import knobs
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.engines.base import Engine, EngineKind
from jaxrl_llm.engines.requests import Node, Request, as_ints, check_tokens
from jaxrl_llm.engines.sampler import row_keys, threefry
from jaxrl_llm.engines.stopping import StopSearch
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.exchange import exchange, is_mine
from jaxrl_llm.sampling.trajectory import Planted, Trajectory, TurnLimits, ended_before, spoken
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies.acts import Act, Begin, BeginPart, FromTrace, Stop, numbered

READS = (
    Knob("temperature", least=0, doc="f32[], of the sampler and of the learner's log-probs. Held-out evaluations keep the "
         "configuration's"),
    Knob("max_tokens", least=1, doc="i32[], of a completion, at most `sampling.max_tokens`; a completion that ends there has "
         "not stopped"),
    Knob("max_turns", least=1, doc="i32[], turns of the policy in a trajectory of an environment, at most those configured"),
    Knob("announced_turns", least=0, doc="i32[], the first limit announced to the policy: after each turn a message gives the "
         "number of turns left; once these are used up, the messages count to `max_turns`; 0: no messages"),
    Knob("spread", least=0, doc="f32[], how strongly first tokens of a group avoid its earlier ones, see "
         "`engines.sampling.spread_out`"),
)
_OF_ONE = ("temperature", "top_k", "top_p", "min_p")  # numbers of `Sampling` that one trajectory may have
REQUEST = 1 << 32  # the engine samples request n of a trajectory as `uid + n * REQUEST`: each has its own random numbers


class Growing(NamedTuple):
    """A trajectory that `take` has not returned yet, as plain data.

    memory: what the partner keeps of it, see `Partner.memory`; None: it has not begun.
    written: what the policy has written of the turn that is sampled; None: nothing, or no turn is sampled.
    sampled: whether a turn is sampled.
    stops: whether it ends with what is there of it (True), or leaves no trace (False), once it is answered; None: it goes on.
    """

    uid: int
    trajectory: Trajectory
    memory: Any = None
    written: Node | None = None
    sampled: bool = False
    stops: bool | None = None


class Partner(Protocol):
    """What answers the policy and rewards trajectories: a task scores one turn of each, an environment answers every turn.
    """

    columns: tuple[Column, ...]  # the further token columns that nodes of the engine have
    alone: bool  # whether it hears the trajectories of this process, and other processes theirs

    @property
    def turns(self) -> int:
        """Maximum turns of a trajectory."""

    @property
    def contexts(self) -> int:
        """Maximum contexts of a trajectory."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts about turns, with their joins, see `turn_info.JOINS`."""

    @property
    def goes_on(self) -> bool:
        """Whether the engine keeps a trajectory whose turn has ended."""

    @property
    def limited(self) -> bool:
        """Whether a batch of trajectories at most may be open at a time, of all processes together."""

    @property
    def by_uid(self) -> bool:
        """Whether chance beside the policy's depends on uids alone, and not on the key of sampling."""

    @property
    def busy(self) -> bool:
        """Whether trajectories wait for it."""

    def answers(self, uid: int) -> bool:
        """Whether a trajectory waits for it."""

    @property
    def reward(self) -> Any:
        """The reward that scores completions; None: rewards come with turns."""

    @property
    def runner(self) -> Any:
        """The runner of an environment, which reports what it loses; None: nothing is lost."""

    @property
    def extract(self) -> Callable[[str, Problem], Any] | None:
        """The reader of answers, of forests that keep them; None for others."""

    def prepare(self, waits: bool) -> list[tuple[str, str]]:
        """Rows for the head of a run; `waits`: whether it hears of a batch only when all of it is sampled."""

    def encode(self, problems: Sequence[Problem], tokenizer: Any, timer: PhaseTimer | None = None) -> list[list[int] | None]:
        """Token ids of prompts; None for a problem that cannot be opened."""

    def plant(self, problems: Sequence[Problem], ids: Sequence[Sequence[int]], draw: int) -> Forest:
        """The forest of these prompts, to grow trajectories on."""

    def limits(self, max_tokens: int | None, max_turns: int | None, announced: int | None) -> TurnLimits:
        """The limits of a trajectory, shorter ones if given; ValueError for what it cannot heed."""

    def limit(self, one: Trajectory) -> int:
        """Maximum of `Trajectory.drawn` at the end of the next turn."""

    def begin(self, going: Mapping[int, Trajectory], problems: Sequence[Problem], timer: PhaseTimer) -> dict[int, Trajectory]:
        """Opens trajectories, by uid; without those that it loses."""

    def hear(self, nodes: Mapping[int, Node], wait: bool, timer: PhaseTimer) -> dict[int, list[int] | None]:
        """What the policy reads next, by uid; None for a trajectory that has ended. `wait`: for one at least."""

    def cut(self, uid: int, written: Node | None, timer: PhaseTimer) -> bool:
        """Ends a trajectory that grows, behind what is `written` of its turn; False if nothing of it is there."""

    def forget(self, uid: int) -> None:
        """Leaves a trajectory out, whether it grows or has ended."""

    def memory(self, uid: int) -> Any:
        """What `resume` needs of a trajectory, as plain data."""

    def resume(self, going: Mapping[int, Trajectory], memories: Mapping[int, Any], problems: Sequence[Problem]) -> set[int]:
        """Takes up trajectories where `memory` left them; returns those that it lost.

        Raises ValueError if it cannot make their state again.
        """

    def grown(self, forest: Forest, begun: Mapping[int, int], computed: int) -> Forest:
        """The forest with all trajectories that have ended; `begun`: the prompt of each, by uid, in order."""

    def check(self, forest: Forest) -> None:
        """Raises the error of a forest of which too much was lost, in all processes together."""

    def beginning(self, problem: Problem, uid: int, role: int, what: FromTrace) -> list[Planted]:
        """What a part of a trace begins a trajectory of a problem with, in this role; tools have their own."""

    def demonstrated(self, problems: Sequence[Problem], strays: float = 0.0) -> Forest:
        """A trajectory of an oracle for each problem, of whose turns a share are random; see `Dialogue.demonstrated`."""

    def scoring(self, reward: Any) -> "Partner":
        """A partner apart whose completions this reward scores."""

    def rest(self) -> None:
        """Begins a batch anew: the share of lost trajectories is one of those from here on."""

    def drop(self) -> None:
        """Forgets the trajectories that it has begun, in whatever state an error left them."""

    def apart(self) -> "Partner":
        """A partner of the same problems that shares no mutable state with this one, for held-out measurements."""


class _Under(NamedTuple):
    """What trajectories are sampled under: the distribution, the limits and the key."""

    sampling: sampling_lib.Sampling
    limits: TurnLimits
    key: jax.Array


@dataclasses.dataclass(eq=False)
class Stream:
    """Grows trajectories: `apply` begins them, `advance` samples a part of them, `take` returns those that have ended.

    A trajectory is a prompt, then turns of the policy and answers of the partner in their order. It depends on its uid, the key
    and the weights alone, not on when and beside which other trajectories it is sampled.

    Attributes:
      kind: the engine, which is made at the first `publish` and lives as long as the stream.
      partner: what answers and rewards.
      sampling: the distribution of a token, and the maximum number of tokens.
      prompts, group: P and G of a batch.  prompt_tokens: length of the longest prompt.  max_tokens: T.
      tokenizer: of prompts and messages.  stop_ids, stop_strings: what ends a message of the policy.
      mesh, dtype: the mesh of the weights and the dtype of the model's computation.  replicas: the mesh of the sampler, over
        all processes, see `parallel.sampler_mesh`; None: that of the weights.
      numbers: those of the distribution that acts set and `sampling` may lack: programs are compiled with them.
      read_tokens: length of the longest text that trajectories read in place of their prompts.
    """

    kind: EngineKind
    partner: Partner
    sampling: sampling_lib.Sampling
    prompts: int
    group: int
    prompt_tokens: int
    max_tokens: int
    tokenizer: Any
    stop_ids: tuple[int, ...]
    mesh: Mesh
    dtype: Any
    stop_strings: tuple[str, ...] = ()
    replicas: Mesh | None = None
    numbers: tuple[str, ...] = ()
    read_tokens: int = 0
    reads: ClassVar[tuple[Knob, ...]] = READS

    def __post_init__(self):
        self._engine: Engine | None = None
        self._under: _Under | None = None
        self._queue: deque[tuple[int, Trajectory]] = deque()
        self._problems: Sequence[Problem] = ()
        self._going: dict[int, Trajectory] = {}
        self._held: dict[int, set[int]] = {}  # numbers of the requests that the engine holds
        self._owner: dict[int, int] = {}  # the trajectory of each uid that the engine has heard of
        self._begun: dict[int, int] = {}  # prompts of the trajectories that `take` is to return
        self._stopping: dict[int, bool] = {}  # trajectories that end once they are answered, and whether they are kept
        self._nodes: _Beside | None = None
        self._ready: list[Node] = []  # nodes that nobody has heard yet
        self._computed, self._decoded, self._unfit = 0, tuple[int, ...](), 0

    @property
    def turns(self) -> int:
        """Maximum turns of a trajectory."""
        return self.partner.turns

    @property
    def contexts(self) -> int:
        """Maximum number of contexts of a trajectory."""
        return self.partner.contexts

    @property
    def facts(self) -> Mapping[str, str]:
        """The partner's facts about turns, with their joins, see `turn_info.JOINS`."""
        return self.partner.facts

    @property
    def longest_read(self) -> int:
        """Maximum tokens of what trajectories read in place of their prompts."""
        return max(self.prompt_tokens, self.read_tokens)

    def prepare(self, parts: int = 1) -> list[tuple[str, str]]:
        """Rows for the head of a run whose batches are sampled in `parts`."""
        return self.partner.prepare(parts == 1 and not self._beside)

    @property
    def _beside(self) -> bool:
        """Whether a thread samples beside rewards; processes that sample together must hear equal nodes."""
        return not self.partner.goes_on and "beside" in self.kind.can and (self.alone or not parallel.several())

    @property
    def alone(self) -> bool:
        """Whether this process is one of several that each sample their own trajectories; `take` then joins them."""
        return self.kind.mesh is not None and parallel.several()

    def apart(self, **changes: Any) -> "Stream":
        """A stream that shares no mutable state with this one, with other attributes if given."""
        return dataclasses.replace(self, **{"partner": self.partner.apart(), **changes})

    # --- a run's calls ------------------------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Samples with the weights, the key and the knobs of a snapshot from now on.

        Raises ValueError for weights of another policy, and for knobs that are out of range or that the partner cannot heed.
        """
        known = knobs.read(self.reads, snapshot.knobs, {}, snapshot.setters)
        dtypes: dict[str, Any] = {"temperature": np.float32, "max_tokens": np.int32, "spread": np.float32}
        values: dict[str, Any] = {name: dtype(known[name]) for name, dtype in dtypes.items() if name in known}
        chosen = dataclasses.replace(self.sampling, **values)
        sampling_lib.check(chosen)
        limits = self.partner.limits(*(int(known[name]) if name in known else None
                                       for name in ("max_tokens", "max_turns", "announced_turns")))
        params = parallel.reshard(snapshot.params, self.mesh, self.dtype, self.replicas)
        lora, key = snapshot.lora, snapshot.key
        if self.alone:
            assert self.kind.mesh is not None
            params, lora = parallel.laid_on((params, lora), self.kind.mesh)
            key = jax.random.wrap_key_data(parallel.fetch(jax.random.key_data(key)), impl=jax.random.key_impl(key))
        self._ready += self._stop()  # a thread would sample while the weights change
        if self._engine is None:
            self._engine = self.kind.make(params, lora, snapshot.version)
        else:
            self._engine.publish(snapshot.version, params, lora)
        self._under = _Under(chosen, limits, key)

    def apply(self, forest: Forest, acts: Sequence[Act], first_uid: int) -> None:
        """Queues trajectories at prompts of the forest, those of this process (`exchange.is_mine`), with uids as in `numbered`.

        Others are stopped: at once, or as soon as the partner has answered. An engine that tells nothing of a turn before its
        end leaves nothing of it. Raises ValueError before the first `publish`, for uids that grow already, for uids to stop
        that do not grow, and for prompts, parts and distributions that cannot be; nothing is begun then.
        """
        if self._under is None or self._engine is None:
            raise ValueError("there are no weights to sample with; publish weights first")
        begun = [(act, uid) for act, uids in numbered(acts, first_uid, self.group)[0] for uid in uids]
        if far := [act.row for act, _ in begun if act.row >= len(forest.problems)]:
            raise ValueError(f"prompt {far[0]} is to be sampled, and the forest has {len(forest.problems)}; rows count from 0")
        if twice := {uid for _, uid in begun} & self._begun.keys():
            raise ValueError(f"trajectory {min(twice)} grows already; give each its own uid")
        prompts = {act.row: forest.prompt_ids(act.row).tolist() for act, _ in begun}
        waiting = [(uid, self._planned(act, uid, forest.problems[act.row], prompts[act.row])) for act, uid in begun
                   if not self.alone or is_mine(uid, self.group)]
        for act in acts:
            if isinstance(act, Stop) and (not self.alone or is_mine(act.uid, self.group)):
                self._end(act)
        self._problems = forest.problems
        self._queue.extend(waiting)
        self._begun |= {uid: one.prompt for uid, one in waiting}

    def _planned(self, act: Begin, uid: int, problem: Problem, ids: list[int]) -> Trajectory:
        """A trajectory of the act, with the token ids of its prompt. Raises ValueError for what cannot begin or draw it."""
        assert self._under is not None and self._engine is not None
        changed(self.sampling, act.sampling)
        if lacking := [name for name in act.sampling if getattr(self.sampling, name) is None and name not in self.numbers]:
            if "numbers" not in self.kind.can:
                raise ValueError(f"trajectory {uid} has {lacking[0]}={act.sampling[lacking[0]]}, and engine {self.kind.name!r} "
                                 f"is compiled without; write Topology(..., numbers=({lacking[0]!r},)), or set "
                                 "sampling.engine='slots'")
        planted = list[Planted]()
        for role, what, logprobs, by in (BeginPart(*part) for part in act.parts):
            if isinstance(what, FromTrace):
                begun = self.partner.beginning(problem, uid, role, what)
                self._unfit += what.share >= 1 and not begun
                planted += begun
                continue
            if not (filled := list(self.tokenizer.encode(what) if isinstance(what, str) else what)):
                continue
            check_tokens(uid, filled, self.tokenizer.vocab_size)
            if logprobs is not None and len(logprobs) != len(filled):
                raise ValueError(f"trajectory {uid} begins with {len(filled)} tokens of {Role(role).name}, and there are "
                                 f"log-probs for {len(logprobs)}; give one for each token, or none")
            known = [np.nan] * len(filled) if logprobs is None else [float(x) for x in logprobs]
            planted.append(Planted(role, filled, known, by))
        if len(reads := as_ints(act.read_ids)):
            check_tokens(uid, reads, self.tokenizer.vocab_size)
            if len(reads) > self.longest_read:
                raise ValueError(f"trajectory {uid} reads {len(reads)} tokens in place of its prompt, and engines are made for "
                                 f"{self.longest_read}; write Topology(..., reads={len(reads)}), or shorten what it reads")
        limits = self._under.limits._replace(turns=1) if act.ends else self._under.limits
        return Trajectory(list(ids), act.row, ids, most=act.limit, limits=limits, planted=planted, sampling=act.sampling,
                          version=self._engine.version, ends=act.ends,
                          reads=reads if reads != ids else [])

    def _end(self, act: Stop) -> None:
        """Ends a trajectory, or marks it to be ended once it is answered."""
        if act.uid not in self._begun:
            raise ValueError(f"trajectory {act.uid} does not grow; stop trajectories that were begun and not taken yet")
        self._settle()
        queued = [one for one in self._queue if one[0] == act.uid]
        if queued:
            self._queue.remove(queued[0])
            del self._begun[act.uid]
        elif act.uid in self._held and self.partner.answers(act.uid):
            self._stopping[act.uid] = act.keep
        elif act.uid in self._held or not act.keep:
            self._cut(act.uid, act.keep)

    def _cut(self, uid: int, keep: bool) -> None:
        """Ends a trajectory that does not wait for an answer."""
        assert self._engine is not None
        one, held = self._going.get(uid), self._held.pop(uid, set())
        written = None if one is None or one.request not in held else self._engine.written(uid + REQUEST * one.request)
        if one is not None and written is not None:  # what is planted alone is nothing that was sampled
            written = spoken(one, written, self.kind.columns) if len(written.tokens) else None
        try:
            for number in held:
                self._engine.release(uid + REQUEST * number)
        except KeyError:  # it ends in what the engine was computing
            self._held[uid] = held
            self._settle()
            if keep:
                return
        if not (keep and self.partner.cut(uid, written, PhaseTimer())):
            self.partner.forget(uid)
            del self._begun[uid]

    def _settle(self) -> None:
        """Lets the partner hear all nodes that have ended."""
        assert self._engine is not None
        nodes, self._ready = [*self._ready, *self._stop(), *self._engine.finished()], []
        while nodes:  # an answer may let the engine look at what has ended
            self._heard(nodes, False, PhaseTimer())
            nodes = self._engine.finished()

    def advance(self, timer: PhaseTimer | None = None) -> bool:
        """Samples a part of the trajectories, and hears what the partner answers; returns whether some still grow.

        Raises the errors of the engine, of the partner and of rewards, after which only `drop` is safe, and RuntimeError if the
        engine has returned no node for a request and has nothing more to sample.
        """
        timer, busy = timer or PhaseTimer(), self.partner.busy
        if not (self._held or busy):
            if not self._queue:
                return False
            self._start(timer)
        with timer("rollout"):
            ran, nodes = self._sampled()
        heard = self._heard(nodes, not ran and not nodes, timer)
        if not self._held:
            self._stop()
        elif not (ran or nodes or heard or self.partner.busy):
            raise RuntimeError(f"engine {self.kind.name!r} has nothing more to sample, and {len(self._held)} trajectories have "
                               f"not ended, the first is {min(self._held)}; an engine returns a node for each request")
        return bool(self._held or self.partner.busy or self._queue)

    def _heard(self, nodes: Sequence[Node], wait: bool, timer: PhaseTimer) -> bool:
        """Lets the partner hear these turns, and the policy read what it answers; returns whether it answers."""
        said = {uid: spoken(self._going[uid], node, self.kind.columns) for node in nodes
                if (uid := self._owner[node.uid]) in self._held}  # others are stopped
        replies = self.partner.hear(said, wait, timer)
        with timer("rollout"):
            for uid, ids in replies.items():
                self._go_on(uid, ids)
        return bool(replies)

    def pending(self) -> tuple[Growing, ...]:
        """All trajectories that `take` has not returned, in their order, as they are now; they go on growing here.

        `restore` continues them in this or another process: the same tokens, under the same weights.
        """
        if self._engine is None:
            return ()
        self._settle()
        waiting, found = dict(self._queue), list[Growing]()
        for uid in self._begun:
            if uid in waiting:
                found.append(Growing(uid, copy.deepcopy(waiting[uid])))
                continue
            one, number = self._going.get(uid), self._held.get(uid, set())
            sampled = one is not None and one.request in number and not self.partner.answers(uid)
            written = self._engine.written(uid + REQUEST * one.request) if sampled and one is not None else None
            found.append(Growing(uid, copy.deepcopy(one), self.partner.memory(uid), written, sampled, self._stopping.get(uid)))
        return tuple(found)

    def restore(self, forest: Forest, pending: Sequence[Growing]) -> None:
        """Continues trajectories at prompts of a forest with the same rows; call it on a stream in which nothing grows.

        Raises ValueError before the first `publish`, if something grows, for a prompt that the forest lacks, and for an
        environment whose state cannot be made again.
        """
        if self._begun or self._engine is None:
            raise ValueError(f"{len(self._begun)} trajectories grow in this stream; publish weights, and restore before apply"
                             if self._begun else "there are no weights to sample with; publish weights first")
        for one in pending:
            if one.trajectory.prompt >= len(forest.problems) or one.trajectory.prompt_ids != forest.prompt_ids(
                    one.trajectory.prompt).tolist():
                raise ValueError(f"trajectory {one.uid} begins with another prompt than row {one.trajectory.prompt} of this "
                                 "forest; restore it with the forest, the task and the tokenizer that it grew with")
        pending = [one for one in pending if not self.alone or is_mine(one.uid, self.group)]
        self._problems = forest.problems
        self._begun = {one.uid: one.trajectory.prompt for one in pending}
        self._queue.extend((one.uid, one.trajectory) for one in pending if one.memory is None)
        begun = [one for one in pending if one.memory is not None]
        self._stopping = {one.uid: one.stops for one in begun if one.stops is not None}
        self._going = {one.uid: one.trajectory for one in begun}
        lost = self.partner.resume(self._going, {one.uid: one.memory for one in begun}, forest.problems)
        again = [one for one in begun if one.sampled and one.uid not in lost]
        self._submit({one.uid: one.trajectory for one in again}, {one.uid: one.written for one in again})

    def take(self, forest: Forest, checked: bool = True) -> Forest:
        """The forest with all trajectories that have ended since the last call; ValueError while some grow or wait.

        Processes that sample apart call it together, and get the trajectories of all. Unless `checked` an
        environment may have lost all of them, which then counts in the next check of the batch.

        Raises AllInvalid if an environment has lost all of them, and the forest has no others.
        """
        if self._held or self._queue:
            raise ValueError(f"{len(self._held) + len(self._queue)} trajectories still grow; advance until none does")
        if self.partner.busy:
            raise ValueError("trajectories wait for their last reward; advance until none does")
        begun, self._begun, self._going, self._owner = self._begun, {}, {}, {}
        total = 0 if self._engine is None else self._engine.computed
        computed, self._computed = total - self._computed, total
        grown = self.partner.grown(forest, begun, computed)
        if self.alone:
            grown = exchange(forest, grown)
        if checked:
            self.partner.check(grown)
        return grown

    def shares(self) -> tuple[int, ...]:
        """Number of tokens that each replica of all processes has drawn since the last call; () where it is not counted."""
        decoded = () if self._engine is None else self._engine.decoded
        before, self._decoded = self._decoded or (0,) * len(decoded), decoded
        new = [now - then for now, then in zip(decoded, before, strict=True)]
        return tuple(itertools.chain(*parallel.gather_objects(new)))

    def unfit(self) -> int:
        """Number of whole traces since the last call that did not fit, of all processes; the policy wrote in their place."""
        count, self._unfit = self._unfit, 0
        return sum(parallel.gather_objects(count)) if self.alone else count

    def run(self, forest: Forest, acts: Sequence[Act], first_uid: int, timer: PhaseTimer | None = None, checked: bool = True
            ) -> Forest:
        """The forest with the trajectories of these acts, with uids from `first_uid` on, once all have ended; see `take`.

        After an error of sampling nothing grows, and the next `publish` makes a new engine.
        """
        self.apply(forest, acts, first_uid)
        try:
            while self.advance(timer):
                pass
        except BaseException:
            self.drop()
            raise
        return self.take(forest, checked)

    def drop(self) -> None:
        """Forgets the engine and all trajectories, in whatever state an error left them; a thread that samples ends later."""
        if self._nodes is not None:
            self._nodes.leave()
        self.__post_init__()
        self.partner.drop()

    def rest(self) -> None:
        """Frees the engine's weights and caches until the next `publish`, see `Engine.rest`."""
        if self._engine is not None:
            self._ready += self._stop()
            self._engine.rest()

    def forget(self) -> None:
        """Begins a batch anew, without the trajectories that an error or an interrupt has left; call it before `publish`."""
        if self._begun:
            self.drop()
        self.partner.rest()

    # --- the engine ---------------------------------------------------------------------------------------------------------

    def _start(self, timer: PhaseTimer) -> None:
        """Begins the trajectories that wait: all of them, or a batch where the partner has places for no more."""
        count = self.prompts * self.group // jax.process_count() if self.partner.limited else len(self._queue)
        waiting = dict(itertools.islice(self._queue, count))
        for _ in waiting:
            self._queue.popleft()
        going = self.partner.begin(waiting, self._problems, timer)
        self._going |= waiting  # also what the partner has lost, for `pending`
        assert self._engine is not None
        with timer("rollout"):
            self._submit(going)

    def _submit(self, going: Mapping[int, Trajectory], written: Mapping[int, Node | None] | None = None) -> None:
        """Requests the next turn of trajectories from the engine, with all ids of their contexts, behind what is `written`."""
        assert self._engine is not None and self._under is not None
        self._owner |= {uid + REQUEST * one.request: uid for uid, one in going.items()}
        limits = {uid: self.partner.limit(one) for uid, one in going.items()}
        whole = {uid: ended_before(one, uid + REQUEST * one.request, limits[uid] - one.drawn, self.stop_ids, self.kind.columns,
                                   StopSearch((), self.stop_strings, self.tokenizer).feed(one.begun))
                 for uid, one in going.items() if one.begun}
        for uid, node in whole.items():
            self._held.setdefault(uid, set())
            self._ready += [] if node is None else [node]
        going = {uid: one for uid, one in going.items() if whole.get(uid) is None}
        if not going:
            return
        numbers = [uid + REQUEST * one.request for uid, one in going.items()]
        keys = words_of(self._under.key, np.array(numbers, np.int64))
        stops = self.stop_strings if "stop_texts" in self.kind.can else ()
        most = max((one.tokens for one in going.values()), default=1)  # under the limits that held when they began
        under = {tuple(one.sampling.items()): one.sampling for one in going.values()}
        plain = dataclasses.replace(self._under.sampling, max_tokens=np.int32(most))
        sampling = {key: with_numbers(changed(plain, own), self.numbers) for key, own in under.items()}
        self._engine.submit(*(Request(
            number, limits[uid], one.context + one.begun, keep=self.partner.goes_on,
            sampling=sampling[tuple(one.sampling.items())], stop_tokens=self.stop_ids, stop_texts=stops,
            begun=len(one.begun), drawn=one.drawn + len(one.begun), written=(written or {}).get(uid), key=key)
            for number, key, (uid, one) in zip(numbers, keys, going.items())))
        for uid, one in going.items():
            self._held.setdefault(uid, set()).add(one.request)

    def _sampled(self) -> tuple[bool, list[Node]]:
        """Whether the engine sampled, and the nodes that ended."""
        assert self._engine is not None
        if self._ready:
            nodes, self._ready = self._ready, []
            return True, nodes
        if not self._beside:
            ran = self._engine.step()
            return ran, self._engine.finished()
        if self._nodes is None:
            self._nodes = _Beside(self._engine.collect)
        try:
            nodes = self._nodes.get()
        except Exception:  # of the thread, which has ended; an interrupt leaves it
            self._nodes = None
            raise
        return bool(nodes), nodes

    def _stop(self) -> list[Node]:
        """Waits for the end of a part that a thread samples; the nodes that nobody has heard yet."""
        beside, self._nodes = self._nodes, None
        return [] if beside is None else beside.stop()

    def _go_on(self, uid: int, ids: list[int] | None) -> None:
        """Lets a trajectory go on with `ids` that the policy reads next; None: it has ended."""
        keep = self._stopping.pop(uid, None)
        if keep is not None and ids is not None:
            self._cut(uid, keep)
            return
        one, held = self._going[uid], self._held.pop(uid, set())
        if not self.partner.goes_on:
            return
        assert self._engine is not None
        kept = set[int]() if ids is None else one.open_requests
        for number in held - kept:
            self._engine.release(uid + REQUEST * number)
        if keep is False:
            self.partner.forget(uid)
            del self._begun[uid]
        if ids is None:
            return
        self._held[uid] = kept & held  # contexts that began with a whole turn, and restored ones, have no request in the engine
        if one.request in held:
            self._engine.extend(uid + REQUEST * one.request, ids, self.partner.limit(one))
        else:
            self._submit({uid: one})


def changed(sampling: sampling_lib.Sampling, numbers: Mapping[str, float]) -> sampling_lib.Sampling:
    """A distribution with other numbers; ValueError for those that it lacks or that are out of range."""
    for name in numbers:
        registry.one_of("number of the distribution of a trajectory", name, _OF_ONE)
    off = sampling_lib.OFF
    values: dict[str, Any] = {name: off.get(name, np.float32()).dtype.type(value) for name, value in numbers.items()}
    changed = dataclasses.replace(sampling, **values)
    sampling_lib.check(changed)
    return changed


def with_numbers(sampling: sampling_lib.Sampling, names: Sequence[str]) -> sampling_lib.Sampling:
    """The same distribution with all of these numbers, at values that leave it as it is where it lacks them."""
    off: dict[str, Any] = {name: sampling_lib.OFF[name] for name in names if getattr(sampling, name) is None}
    return dataclasses.replace(sampling, **off)


def words_of(key: jax.Array, uids: np.ndarray) -> list[tuple[int, int]]:
    """The two words of the key of each trajectory, see `sampler.row_keys`; a few lengths serve all numbers of them."""
    padded = np.pad(uids, (0, (1 << (len(uids) - 1).bit_length()) - len(uids)))
    words = parallel.fetch(jax.random.key_data(row_keys(threefry(key), padded)))[:len(uids)]
    return [tuple(pair) for pair in words.tolist()]


class _Beside:
    """Samples in a thread beside the caller's work: `get` returns nodes that have ended, all that are ready.

    A thread that nobody waits for: an interrupt or an error ends a run at once, also while a server is silent.
    """

    def __init__(self, collect: Callable[[], list[Node]]):
        self._made: queue.SimpleQueue[list[Node] | BaseException] = queue.SimpleQueue()
        self._collect, self._stopped, self._ended = collect, False, False
        self._thread = threading.Thread(target=self._make, name="sampling", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            nodes: list[Node] = [] if self._stopped else self._collect()
            while nodes:
                self._made.put(nodes)
                nodes = [] if self._stopped else self._collect()
            self._made.put([])
        except BaseException as error:  # raised where the nodes are used
            self._made.put(error)

    def get(self) -> list[Node]:
        """Waits for nodes; an empty list if there will be no more. An error is raised behind the nodes before it."""
        nodes: list[Node] = []
        while not self._ended and (not nodes or not self._made.empty()):
            part = self._made.get()
            if isinstance(part, BaseException) and nodes:
                self._made.put(part)  # for the next call
                return nodes
            self._ended = isinstance(part, BaseException) or not part
            if isinstance(part, BaseException):
                raise part
            nodes += part
        return nodes

    def leave(self) -> None:
        """Ends the thread after what it samples now, without waiting for it."""
        self._stopped = True

    def stop(self) -> list[Node]:
        """Ends the thread after what it samples now; the nodes that `get` has not returned."""
        self._stopped, nodes = True, []
        while not self._ended:
            nodes += self.get()
        self._thread.join()
        return nodes

"""An environment as the partner of a policy: a runner of environments answers every turn of it."""
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data import turn_info
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import Forest, grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.prompts import spelled
from jaxrl_llm.engines.requests import Node
from jaxrl_llm.environments import base
from jaxrl_llm.environments.answers import Answers
from jaxrl_llm.environments.runner import AllInvalid, Recording, Runner
from jaxrl_llm.rewards.text import through_stop_string
from jaxrl_llm.sampling.shown_tools import behind, variables_of
from jaxrl_llm.sampling.stream import Partner
from jaxrl_llm.sampling.trajectory import Planted, Trajectory, TurnLimits, authors, beginning, names, stretches
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import Trace, trace_of
from jaxrl_llm.tokenizers import conversation
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies.acts import FromTrace

HELD_OUT = (2**31 - 1) << 32  # added to uids of held-out trajectories, so that environments see other keys than in training
ORACLE = "oracle"  # the name of the writer of what an oracle says
_DEMONSTRATED = 1  # the seed of demonstrations before the first step
_OPENINGS = (2**31 - 2) << 32  # uids of openings that are read as prompts; nothing is drawn with them
_HELD_OUT_OPENINGS = 2**31  # the first of them for held-out problems: a file of lost trajectories names each by its uid


class Memory(NamedTuple):
    """A trajectory in an environment, as plain data.

    lost: whether the environment lost it.  over: whether it has ended otherwise.  cut: whether its last reward is awaited.
    waits: the turn that the environment is to answer, and what it says; None: none.  said: the policy's messages that the
    environment has answered, unless the trajectory has ended.
    """

    lost: bool
    over: bool
    cut: bool
    waits: tuple[Node, base.Message] | None
    said: list[base.Message]


def _numbers(first: int) -> Iterator[int]:
    """Numbers of openings, of which each of several processes has its own."""
    return itertools.count(first + jax.process_index(), jax.process_count())


@dataclasses.dataclass(eq=False)
class Dialogue:
    """Plays trajectories of an environment: its opening is the prompt, then turns of the policy and answers in their order.

    A trajectory that its environment loses is not in the forest: it is counted by name, and its group is smaller. A trajectory
    that reaches `turns` or `max_tokens` is cut there, with its rewards so far and the one of `Environment.cut`.

    Attributes:
      runner: the environment's runner.
      prompts, group: P and G of a batch.
      turns: maximum turns of the policy in a trajectory.  turn_tokens: maximum tokens of a turn.  max_tokens: maximum tokens
        after the prompt.
      tokenizer, stop_strings: the tokenizer of messages, and strings that end a turn beside the tokenizer's stop tokens.
      observation_tokens: maximum tokens of a message of the environment; a longer one loses its middle; 0: no limit.
      hears_tools: whether the chat template has the role of tools; else the results of a turn are one message of the user.
      describes_tools: whether the prompt begins with `Environment.calls`, as the chat template shows no tools.
      offset: added to uids of trajectories, see `HELD_OUT`.
      opened: numbers of openings that are read as prompts.
      columns: the further token columns that nodes of the engine have; others' tokens have the fill.
      alone: whether other processes play trajectories of their own beside it.
    """

    runner: Runner
    prompts: int
    group: int
    turns: int
    turn_tokens: int
    max_tokens: int
    tokenizer: Any
    stop_strings: Sequence[str] = ()
    observation_tokens: int = 0
    hears_tools: bool = True
    describes_tools: bool = False
    offset: int = 0
    opened: Iterator[int] = dataclasses.field(default_factory=lambda: _numbers(0))
    columns: tuple[Column, ...] = ()
    alone: bool = False
    goes_on: ClassVar[bool] = True
    by_uid: ClassVar[bool] = True
    reward: ClassVar[None] = None

    def __post_init__(self):
        self._answers = Answers(self.runner)
        self._going: dict[int, Trajectory] = {}
        self._waiting: dict[int, tuple[Node, base.Message]] = {}
        self._cut, self._lost, self._dropped = set[int](), set[int](), set[int]()

    @property
    def facts(self) -> Mapping[str, str]:
        """The environment's facts about turns, with their joins, see `turn_info.JOINS`."""
        return self.runner.environment.facts

    @property
    def contexts(self) -> int:
        """Maximum number of contexts of a trajectory."""
        return self.runner.environment.contexts

    @property
    def extract(self) -> Callable[[str, Problem], Any] | None:
        """None: a turn's text is no answer."""
        return None

    @property
    def limited(self) -> bool:
        """Whether at most a batch of trajectories may be open at a time, since servers have room for that many."""
        return not self.runner.environment.replayable

    @property
    def busy(self) -> bool:
        """Whether trajectories wait for the environment."""
        return bool(self._waiting or self._cut)

    def prepare(self, waits: bool) -> list[tuple[str, str]]:
        """The environment, and how it shows tools."""
        rows = [("environment", f"{self.runner.environment.name}, up to {self.turns} turns of {self.turn_tokens} tokens")]
        if self.runner.environment.tools and not self.hears_tools:
            rows.append(("results of tools", "one message of the user in each turn; the chat template has no role of tools"))
        if self.describes_tools:
            rows.append(("tools", "described at the beginning of the prompt; the chat template does not show them"))
        return rows

    def plant(self, problems: Sequence[Problem], ids: Sequence[Sequence[int]], draw: int) -> Forest:
        """The forest of these prompts, to grow groups on. The only component of the reward is `success`, see `success`."""
        return plant(problems, ids, ["success"], answers=False, turns=True, draw=draw, columns=self.columns)

    def rest(self) -> None:
        """Begins a batch anew: the share of lost trajectories is one of those from here on."""
        self.runner.forget()

    def drop(self) -> None:
        """Forgets all trajectories, and ends those of the environment."""
        self.runner.drop()
        self.__post_init__()

    def scoring(self, reward: Any) -> Partner:
        """Raises NotImplementedError: an environment rewards its trajectories."""
        raise NotImplementedError("an environment rewards its trajectories; give an evaluation set a stream of its own")

    def apart(self) -> Partner:
        """The same environment with a runner of its own, for held-out problems."""
        return dataclasses.replace(self, runner=self.runner.apart(), offset=HELD_OUT,
                                   opened=_numbers(_HELD_OUT_OPENINGS))

    def encode(self, problems: Sequence[Problem], tokenizer: Any, timer: PhaseTimer | None = None) -> list[list[int] | None]:
        """Token ids of the opening of each problem and of all its contexts; None if the environment fails to open it.

        Such a failure is counted. Processes that play together call it together, each with problems of its own.
        """
        timer = timer or PhaseTimer()
        uids = [_OPENINGS + next(self.opened) for _ in problems]
        size = self.prompts * self.group // jax.process_count() if self.limited else max(len(uids), 1)
        opened: dict[int, base.Turn] = {}
        for first in range(0, len(uids), size):
            with timer("wait"):
                turns = self.runner.reset(dict(zip(uids[first:first + size], problems[first:first + size])))
                self.runner.end(list(turns))
            opened |= turns
        self.runner.check(self.runner.tallies())
        return [self._start(tokenizer, opened[uid].messages) if uid in opened else None for uid in uids]

    def _start(self, tokenizer, opening: Sequence[base.Message]) -> list[int]:
        """Token ids of an opening, and of all contexts of its trajectory."""
        if self.runner.environment.tokens:
            return conversation.given(tokenizer, opening)
        opening = base.addressed(opening)[0] if self.runner.environment.apart else opening
        start = conversation.start if self.contexts == 1 else conversation.shared
        return start(tokenizer, self._in_roles(self._with_tools(opening)), **variables_of(self.runner.environment))

    def _with_tools(self, opening: Sequence[base.Message]) -> Sequence[base.Message]:
        """The opening, behind a description of the tools if the prompt has one."""
        return behind(opening, self.runner.environment.calls) if self.describes_tools else opening

    def _in_roles(self, messages: Sequence[base.Message]) -> Sequence[base.Message]:
        """The messages in roles that the chat template has."""
        return messages if self.hears_tools else conversation.without_tools(messages)

    def limits(self, max_tokens: int | None, max_turns: int | None, announced: int | None) -> TurnLimits:
        """The limits of a trajectory, shorter ones if given; ValueError for announced turns that cannot be told."""
        if announced and self.runner.environment.tokens:
            raise ValueError(f"environment {self.runner.environment.name!r} speaks in tokens, so it cannot announce how many "
                             "turns are left; take a method without announced turns")
        return TurnLimits(self.turns if max_turns is None else min(self.turns, max_turns),
                          self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens), announced or 0)

    def limit(self, one: Trajectory, more: int = 0) -> int:
        """Maximum of `drawn` at the end of the next turn, after `more` tokens of others."""
        return one.drawn + min(self.turn_tokens, one.tokens - one.behind - more)

    def begin(self, going: Mapping[int, Trajectory], problems: Sequence[Problem], timer: PhaseTimer) -> dict[int, Trajectory]:
        """Opens trajectories; without those that the environment loses.

        Raises ValueError if the trajectories of a problem open differently from each other or from its prompt, TooManyInvalid
        if the environment has lost more trajectories of the batch than the runner allows.
        """
        with timer("wait"):
            opened = self.runner.reset({self.offset + uid: problems[one.prompt] for uid, one in going.items()})
        check_openings({uid: (one.prompt, opened[self.offset + uid]) for uid, one in going.items()
                        if self.offset + uid in opened})
        going = {uid: one for uid, one in going.items() if self.offset + uid in opened}
        with timer("template"):
            self._check_prompts({one.prompt: one.prompt_ids for one in going.values()},
                                {one.prompt: opened[self.offset + uid].messages for uid, one in going.items()})
        for uid, one in going.items() if self.contexts > 1 else ():
            self._open(one, opened[self.offset + uid].messages)
        self._going |= going
        return dict(going)

    def hear(self, nodes: Mapping[int, Node], wait: bool, timer: PhaseTimer) -> dict[int, list[int] | None]:
        """Tells the environment what the policy said, and returns what it reads next, by uid; None: its trajectory has ended.

        An environment that waits is waited for only with `wait`, if no row is left to sample.
        """
        said = {uid: self._said(node) for uid, node in nodes.items()}
        self._waiting |= {uid: (node, said[uid]) for uid, node in nodes.items()}
        with timer("wait"):
            if said:
                self._answers.ask({self.offset + uid: message for uid, message in said.items()})
            turns = {uid - self.offset: turn for uid, turn in self._answers.ready(wait).items()}
        for uid in self._cut & turns.keys():
            self._rewarded(uid, turns.pop(uid))
        answered = {uid: self._waiting.pop(uid) for uid in turns}
        with timer("template"):
            read = {uid: self._answered(self._going[uid], *answered[uid], turn) for uid, turn in turns.items()
                    if turn is not None}
        self._lost |= turns.keys() - read.keys()
        self._cut_short([uid for uid, ids in read.items() if ids is None and not self._going[uid].done], timer)
        return {uid: read.get(uid) for uid in answered}

    def _rewarded(self, uid: int, last: base.Turn | None) -> None:
        """Adds the reward of a trajectory that was cut; None: the environment lost it."""
        self._cut.remove(uid)
        if last is None:
            self._lost.add(uid)
        else:
            self._going[uid].add(last.reward)

    def _cut_short(self, uids: Sequence[int], timer: PhaseTimer) -> None:
        """Ends trajectories at a limit of the run; the environment may have a last reward for them."""
        if self.runner.environment.cut is None:
            self.runner.end([self.offset + uid for uid in uids])
        elif uids:
            self._cut |= set(uids)
            with timer("wait"):
                self._answers.ask({self.offset + uid: base.CUT for uid in uids})

    def answers(self, uid: int) -> bool:
        """Whether the environment is to answer the trajectory's last message."""
        return uid in self._waiting

    def cut(self, uid: int, written: Node | None, timer: PhaseTimer) -> bool:
        """Ends a trajectory behind what is written of its turn, which the environment does not hear; False if nothing is there.
        """
        one = self._going[uid]
        if written is not None and len(written.tokens):
            own = self._turn(one, written, self._said(written)["content"])
            one.append(**own, turn_info=self._located(own["ids"], {}))
        elif one.pieces and one.pieces[-1]["role"] == Role.ENVIRONMENT:
            one.pop()  # an answer without a next turn
        if one.turns:
            self._cut_short([uid], timer)
        return bool(one.turns)

    def forget(self, uid: int) -> None:
        """Leaves a trajectory out, and ends that of the environment."""
        self._dropped.add(uid)
        if uid not in self._cut and self.runner.runs(self.offset + uid):
            self.runner.end([self.offset + uid])

    def memory(self, uid: int) -> Memory:
        """Where the trajectory is, and the messages that its environment has answered."""
        lost = uid in self._lost or uid not in self._going
        over = not lost and not self.runner.runs(self.offset + uid)
        waits, cut = self._waiting.get(uid), uid in self._cut
        said = [] if lost or over else list(self.runner.recording(self.offset + uid).said)
        return Memory(lost, over, cut, waits, said[:-1] if cut or waits else said)

    def resume(self, going: Mapping[int, Trajectory], memories: Mapping[int, Memory], problems: Sequence[Problem]) -> set[int]:
        """Makes the states of the environment again from what the policy said, where a trajectory goes on."""
        self._lost = {uid for uid, known in memories.items() if known.lost}
        self._going |= {uid: one for uid, one in going.items() if uid not in self._lost}
        keys = {uid: base.key_of(self.runner.seed, self.offset + uid) for uid in self._going}
        if goes_on := {uid: one for uid, one in self._going.items() if not memories[uid].over}:
            self.runner.resume({self.offset + uid: Recording(problems[one.prompt], keys[uid], memories[uid].said)
                                for uid, one in goes_on.items()})
        self._lost |= {uid for uid in self._going if self.offset + uid in self.runner.invalid}
        self._waiting |= {uid: known.waits for uid, known in memories.items() if known.waits and uid not in self._lost}
        self._cut |= {uid for uid, known in memories.items() if known.cut and uid not in self._lost}
        self._answers.ask({self.offset + uid: message for uid, (_, message) in self._waiting.items()} |
                          {self.offset + uid: base.CUT for uid in self._cut})
        return set(self._lost)

    def grown(self, forest: Forest, begun: Mapping[int, int], computed: int) -> Forest:
        """The forest with these trajectories, without those that the environment lost."""
        ended = {uid: one for uid in begun if (one := self._going.pop(uid, None)) is not None and uid not in self._lost}
        self._lost.clear()
        for uid in self._dropped:
            self._going.pop(uid, None)
        self._dropped.clear()
        asked, got = (np.bincount(np.array(whose, np.int64), minlength=len(forest.problems))
                      for whose in ([*begun.values()], [one.prompt for one in ended.values()]))
        lost = forest.lost + asked - got
        invalid, seconds = self.runner.taken()
        whole = grown(forest, ended, self.runner.environment.returns, invalid, computed, seconds)
        return whole.with_columns(lost=lost.astype(np.int32))

    def check(self, forest: Forest) -> None:
        """Raises TooManyInvalid if all processes together have lost too many, AllInvalid if the forest has no trajectory."""
        tallies = self.runner.tallies()
        if forest.lost.any() and not len(forest.ends):
            first = next((one for tally in tallies for one in tally.lost), None)
            why = "before they were restored" if first is None else f"the first: {first.kind}, {first.message}"
            raise AllInvalid(f"the environment lost all {forest.lost.sum()} trajectories of a batch "
                             f"({dict(forest.invalid)}); {why}")
        self.runner.check(tallies)

    def _check_prompts(self, prompts: Mapping[int, list[int]], opened: Mapping[int, Sequence[base.Message]]) -> None:
        """Raises ValueError if an opening, by prompt, is another one than the policy reads.

        A chat template may write the date, so a prompt of other tokens may be used if all lines of the opening are in it.
        """
        environment = self.runner.environment
        for row, opening in opened.items():
            if self._start(self.tokenizer, opening) == prompts[row]:
                continue
            read = self.tokenizer.decode(prompts[row], skip_special=False)
            lines = [line.strip() for message in base.addressed(opening)[0] for line in message["content"].splitlines()]
            if environment.tokens or not all(line in read for line in lines):
                raise ValueError(f"environment {environment.name!r} opens a problem with {str(opening)[:200]}, but the policy "
                                 f"reads {read[:200]!r}, its opening at an earlier time; what `reset` asks must depend on the "
                                 "problem alone: draw it from the problem, and use no server that ignores its seed")

    def _said(self, node: Node) -> base.Message:
        """The sampled message through its stop string, with its tokens if the environment reads tokens."""
        ids = node.tokens.tolist()
        message = conversation.said(self.tokenizer, ids)
        message["content"] = through_stop_string(message["content"], self.stop_strings)
        return {**message, "ids": ids} if self.runner.environment.tokens else message

    def beginning(self, problem: Problem, uid: int, role: int, what: FromTrace) -> list[Planted]:
        """The first tokens of a trajectory's first turn: of a trace of the problem, else of what the oracle says first.

        The oracle sees the state of the very trajectory, which is opened for it.
        """
        environment = self.runner.environment
        if {"traces", "solution"} & {*problem.extra} or environment.oracle is None:
            trace = trace_of(problem, what.number)
        else:
            key = base.key_of(self.runner.seed, self.offset + uid)
            trace = Trace(environment.oracle(base.begin(environment, problem, key)[0]), ORACLE)
        most = min(self.turn_tokens, self.max_tokens)
        asked = dataclasses.replace(problem, prompt="") if environment.tokens else problem  # without a template
        return beginning(spelled(trace, asked, self.tokenizer), what.share, most, role, trace.writer)

    def demonstrated(self, problems: Sequence[Problem], strays: float = 0.0) -> Forest:
        """One trajectory of each problem in which the environment's oracle replaces the policy.

        They are played in this process, one after the other. What the oracle says has the role of an expert, and unknown
        log-probs. A share `strays` of the turns are random `choices` of the environment, with the role of hints: they lead to
        states that a policy reaches by its own mistakes, from which the oracle continues (Laskey et al., arXiv 1703.09327).
        Raises ValueError if there is no oracle, or no choices, or if a message does not fit in a turn.
        """
        environment, ended, limits = self.runner.environment, {}, TurnLimits(self.turns, self.max_tokens)
        if strays and environment.choices is None:
            raise ValueError(f"environment {environment.name!r} has no choices to stray to; set warmup.strays=0")
        if environment.oracle is None:
            raise ValueError(f"environment {environment.name!r} has no oracle to imitate; set warmup.steps=0")
        for number, problem in enumerate(problems):
            key = base.key_of(_DEMONSTRATED, problem.id)
            (state, turn), chance = base.begin(environment, problem, key), random.Random(key)
            prompt = self._start(self.tokenizer, turn.messages)
            one = ended[number] = Trajectory(list(prompt), number, prompt, limits=limits, version=0)
            if self.contexts > 1:
                self._open(one, turn.messages)
            ids: list[int] | None = prompt
            while ids is not None:
                stray = chance.random() < strays
                text = chance.choice(environment.choices(state)) if stray and environment.choices else environment.oracle(state)
                tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_id]
                said = {"role": "assistant", "content": text, **({"ids": tokens} if environment.tokens else {})}
                if len(tokens) > min(self.turn_tokens, self.max_tokens):
                    raise ValueError(f"the oracle of {environment.name!r} says {text[:120]!r}, {len(tokens)} tokens with the "
                                     f"end token; sampling.turn_tokens={self.turn_tokens} and sampling.max_tokens="
                                     f"{self.max_tokens} must be at least that")
                if one.turns and len(tokens) > self.limit(one) - one.drawn:
                    one.pop()  # an answer without a next turn
                    break
                unknown = np.full(len(tokens), np.nan, np.float32)
                node = Node(number, None, 0, np.array(tokens, np.int32), unknown, unknown, np.zeros(len(tokens), np.int32),
                            "stop")
                ids = self._answered(one, node, said, base.advance(environment, state, said),
                                     Role.HINT if stray else Role.EXPERT)
        forest = self.plant(problems, [one.prompt_ids for one in ended.values()], 0)
        return grown(forest, ended, environment.returns, Counter())

    def _answered(self, one: Trajectory, node: Node, message: base.Message, turn: base.Turn, role: Role = Role.POLICY
                  ) -> list[int] | None:
        """Adds a turn of the policy and the environment's answer; returns the answer's ids, None at the trajectory's end."""
        own = self._turn(one, node, message["content"], role)
        if turn.rewritten:
            own = self._rewritten(one, own, turn.rewritten)
        one.append(**own, turn_rewards=turn.reward, turn_info=self._located(own["ids"], turn.info))
        one.total, one.done = one.total + turn.reward, turn.done
        if one.done or one.turns >= one.limits.turns:
            return None
        if self.runner.environment.tokens:
            ids = conversation.given(self.tokenizer, turn.messages)
            return self._heard(one, ids, self.tokenizer.decode(ids, skip_special=False))
        messages = conversation.shortened(self.tokenizer, turn.messages, self.observation_tokens or self.max_tokens)
        if one.limits.announced:
            messages[-1]["content"] += f"\nTurns left: {one.limits.left(one.turns)}."
        last = self.runner.environment.last
        if last and one.turns == one.limits.turns - 1 and not messages[-1]["content"].endswith(last):
            messages[-1]["content"] += f"\n{last}"
        if turn.fresh:
            return self._renewed(one, messages)
        if self.runner.environment.apart:
            begun, messages = one.hand_to(messages[-1][base.READER]), without_readers(messages)
            if begun:
                return self._begun(one, messages)
        ids = conversation.extend(self.tokenizer, one.ids, self._in_roles(messages), **variables_of(self.runner.environment))
        return self._heard(one, ids, "\n".join(message["content"] for message in messages))

    def _turn(self, one: Trajectory, node: Node, text: str, role: Role = Role.POLICY) -> dict[str, Any]:
        """What a trajectory appends for a turn of the policy, which it counts."""
        planted = [] if one.turns or role != Role.POLICY else one.planted
        wrote = authors(planted, len(node.tokens), one.writer if role == Role.POLICY else role)
        named = np.full(len(wrote), ORACLE, object) if role == Role.EXPERT else names(planted, len(wrote))
        one.drawn, one.turns = one.drawn + len(node.tokens), one.turns + 1
        one.version = int(node.policy_version[-1])
        return {"role": role, "ids": node.tokens.tolist(), "text": text, "logprobs": node.logprobs,
                "entropies": node.entropies, "version": node.policy_version, "author": wrote, "named": named,
                **node.columns}

    def _heard(self, one: Trajectory, ids: list[int], text: str) -> list[int] | None:
        """Adds the next `ids` that the policy reads, and returns them; None if they leave no token for its next turn."""
        if self.limit(one, len(ids)) <= one.drawn:
            return None
        one.append(Role.ENVIRONMENT, ids, text)
        return ids

    def _located(self, ids: Sequence[int], info: Mapping[str, Any]) -> dict[str, Any]:
        """The environment's facts of a turn, with text positions converted to tokens, and whether a stop token ended it."""
        starts = self._starts(ids) if "spans" in self.facts.values() else []
        return turn_info.of_tokens(self.facts, info, starts, bool(ids) and ids[-1] in self.tokenizer.stop_ids)

    def _starts(self, ids: Sequence[int]) -> list[int]:
        """The character offset in the text where each token begins; the tokens of a character all begin with it."""
        whole = self.tokenizer.decode(ids, skip_special=False)
        return [complete(self.tokenizer.decode(ids[:place], skip_special=False), whole) for place in range(len(ids))]

    def _rewritten(self, one: Trajectory, last: Mapping[str, Any], parts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The turn made of `parts` of the `last` turn and of the previous one, which is removed together with its answer.

        Tokens are the sampled ones, with their log-probs. Raises ValueError if there is no previous turn.
        """
        if one.last < 0 or one.parents[one.last] < 0:
            raise ValueError(f"environment {self.runner.environment.name!r} rewrites the first turn of a context; there is "
                             "none before it")
        one.pop()
        before = {**one.pieces[-1], "ids": one.pieces[-1]["tokens"].tolist(), "text": one.pieces[-1]["texts"]}
        one.pop()
        one.turns -= 1
        one.ask_anew()
        kept = ("logprobs", "entropies", "version", "author", "named", *(column.name for column in self.columns))
        ids, text, columns = [], "", {name: [] for name in kept}
        for back, start, end in parts:
            source = before if back else last
            starts = np.array(self._starts(source["ids"]))
            chosen = np.flatnonzero((starts >= start) & (starts < end))
            ids += [source["ids"][place] for place in chosen]
            text += source["text"][start:end]
            for name, values in columns.items():
                values.extend(np.asarray(source[name])[chosen])
        others = np.array(columns["author"]) != Role.POLICY
        role = Role.HINT if others[others.sum():].any() or Role.HINT in (before["role"], last["role"]) else last["role"]
        return {"role": role, "ids": ids, "text": text, **{name: np.array(values) for name, values in columns.items()}}

    def _renewed(self, one: Trajectory, messages: Sequence[base.Message]) -> list[int] | None:
        """Begins a new context with these messages after the opening, and returns their ids; None if they fill the context.

        Raises ValueError if there are too many contexts.
        """
        if one.contexts >= self.contexts:
            raise ValueError(f"environment {self.runner.environment.name!r} begins context {one.contexts + 1} of a "
                             f"trajectory, and says that it has contexts={self.contexts} at most")
        one.begin()
        return self._begun(one, messages)

    def _begun(self, one: Trajectory, messages: Sequence[base.Message]) -> list[int] | None:
        """Adds the first messages of a context, and returns their ids; None if they fill the context."""
        ids = self._read(one, messages)
        if self.limit(one) > one.drawn:
            return ids
        one.pop()
        return None

    def _open(self, one: Trajectory, opening: Sequence[base.Message]) -> None:
        """Adds the first context of a trajectory of several; of agents with contexts of their own, that of the first one."""
        one.opening, own = opening, list[base.Message]()
        if self.runner.environment.apart:
            one.opening, own = base.addressed(opening)
            one.reader = own[-1][base.READER]
        self._read(one, without_readers(own))

    def _read(self, one: Trajectory, messages: Sequence[base.Message]) -> list[int]:
        """Adds the messages that the policy reads in a new context after the prompt, and returns their ids."""
        spoken = self._in_roles([*self._with_tools(one.opening), *messages])
        whole = conversation.start(self.tokenizer, spoken, **variables_of(self.runner.environment))
        count = len(one.prompt_ids)
        if whole[:count] != one.prompt_ids:
            raise ValueError("the chat template writes the opening of a conversation otherwise when messages follow: the "
                             "contexts of a trajectory have no common prompt; set config.model.chat_template to another one")
        one.append(Role.ENVIRONMENT, whole[count:], "\n".join(message["content"] for message in messages))
        return whole[count:]


def without_readers(messages: Sequence[base.Message]) -> list[base.Message]:
    """The messages as a chat template reads them."""
    return [{name: value for name, value in message.items() if name != base.READER} for message in messages]


def complete(text: str, whole: str) -> int:
    """The number of characters of a decoded beginning of `whole`, without a last one of which tokens are missing.

    Such a character is decoded as one or several U+FFFD, which may also be in the whole text.
    """
    size = len(text)
    while size and text[size - 1] == "\ufffd" and whole[size - 1:size] != "\ufffd":
        size -= 1
    return size


def check_openings(opened: Mapping[int, tuple[int, base.Turn]]) -> None:
    """Raises ValueError if trajectories of one prompt, `{uid: (prompt, opening)}`, open differently."""
    first: dict[int, base.Turn] = {}
    for uid, (prompt, turn) in opened.items():
        if first.setdefault(prompt, turn).messages != turn.messages:
            raise ValueError(f"trajectory {uid} opens with other messages than one of the same problem: "
                             f"{str(turn.messages)[:200]}; what `reset` asks is to depend on the problem alone, not on the key")


def success(total: float, returns: tuple[float, float]) -> float:
    """A return rescaled to [0, 1] by the lowest and highest return of the environment."""
    low, high = returns
    return min(max((total - low) / (high - low), 0.0), 1.0)


def by_author(piece: Mapping[str, Any], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """The nodes of a piece: one for each author of its tokens in a row, if the policy wrote it.

    The last has the text, reward and facts of the whole message. `columns`: those of tokens.
    """
    author, named, kept = piece["author"], piece["named"], [column.name for column in columns if column.name in piece]
    if piece["role"] != Role.POLICY:
        return [{**piece, "writer": named[0] if len(named) else ""}]
    runs = [{**piece, **{name: piece[name][start:end] for name in kept},
             **({"role": author[start], "writer": named[start]} if len(author) else {"writer": ""})}
            for start, end in stretches(author, named)]
    return [*({**run, "texts": "", "turn_rewards": 0.0, "turn_info": {}} for run in runs[:-1]), runs[-1]]


def grown(forest: Forest, ended: Mapping[int, Trajectory], returns: tuple[float, float], invalid: Counter, computed: int = 0,
          seconds: Sequence[float] = ()) -> Forest:
    """The forest with the nodes of these trajectories, by uid.

    `computed`: number of tokens that the engine computed; `seconds`: those of each call of the environment.
    """
    roots = np.flatnonzero(forest.role == Role.PROMPT)
    rows: list[dict[str, Any]] = []
    parents: list[int] = []
    for uid, one in ended.items():
        ends: list[int] = []  # of the pieces
        for place, (piece, parent) in enumerate(zip(one.pieces, one.parents)):
            above = roots[one.prompt] if parent < 0 else ends[parent]
            parts = by_author(piece, forest.of("token"))
            for part in parts:
                last = part is parts[-1] and place == len(one.pieces) - 1
                parents.append(above)
                rows.append({"uid": uid, "prompt": one.prompt, "stopped": one.done or not last, "length": len(part["tokens"]),
                             "rewards": one.total if last else 0.0, "reads": one.read_by(part["role"]),
                             "components": [success(one.total, returns) if last else 0.0], **part})
                above = len(forest.uid) + len(rows) - 1
            ends.append(above)
    columns: dict[str, Any] = {column.name: np.concatenate([column.filled(0), *(
        column.array(row.get(column.name, column.filled(row["length"])), row["length"]) for row in rows)])
        for column in forest.of("token")}
    columns |= {column.name: [row[column.name] for row in rows] for column in forest.of("node") if column.name != "parent"}
    return grow(forest, np.array(parents, np.int32), np.array([row["uid"] for row in rows], np.int64), columns,
                computed=computed, invalid=invalid, seconds=seconds)

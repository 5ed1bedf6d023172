"""Groups of trajectories in an environment: the engine samples turns of the policy, a runner of environments answers them."""
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel, turn_info
from jaxrl_llm.environments import base
from jaxrl_llm.environments.answers import Answers
from jaxrl_llm.environments.runner import AllInvalid, Runner
from jaxrl_llm.forest import Forest, grow, plant
from jaxrl_llm.generation import sampling as sampling_lib
from jaxrl_llm.generation.engine import Node, Request
from jaxrl_llm.rewards.text import through_stop_string
from jaxrl_llm.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers import conversation
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.shown_tools import behind, variables_of
from jaxrl_llm.training.trajectory import Trajectory

HELD_OUT = (2**31 - 1) << 32  # added to uids of held-out trajectories, so that environments see other keys than in training
_REQUEST = 1 << 32  # the engine samples request n of a trajectory as `uid + n * _REQUEST`: each has its own random numbers
_DEMONSTRATED = 1  # the seed of demonstrations before the first step
_OPENINGS = (2**31 - 2) << 32  # uids of openings that are read as prompts; nothing is drawn with them


class Limits(NamedTuple):
    """Maximum turns of the policy in a trajectory, and maximum tokens after its prompt.

    `announced`: the first limit of turns announced to the policy, see `control.Settings`; 0: none.
    """

    turns: int
    tokens: int
    announced: int = 0

    def left(self, turns: int) -> int:
        """The number of turns left that is announced to the policy after `turns` turns."""
        return (self.announced if turns < self.announced < self.turns else self.turns) - turns


class Weights(NamedTuple):
    """A policy to sample with, its sampling distribution and its limits."""

    params: Any
    lora: Any
    sampling: sampling_lib.Sampling
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """`group` trajectories for each of `prompts` problems, as `groups.Sampler` samples completions.

    A trajectory is the opening of its environment (the prompt), then turns of the policy and answers in their order. It depends
    only on its uid, the key and the weights. A trajectory that its environment loses is not in the forest: it is counted by
    name, and its group is smaller. A trajectory that reaches `turns` or `max_tokens` is cut there, with its rewards so far and
    the one of `Environment.cut`.

    Attributes:
      make_engine: `(params, key, slot_tokens=, version=, lora=)` -> an `Engine`, or an object with its contract, for turns.
      runner: the environment's runner.
      sampling: the distribution of a token.
      prompts, group: P and G.  prompt_tokens: length of the longest opening.
      turns: maximum turns of the policy in a trajectory.  turn_tokens: maximum tokens of a turn.  max_tokens: maximum tokens
        after the prompt.
      tokenizer, stop_strings: the tokenizer of messages, and strings that end a turn beside the tokenizer's stop tokens.
      mesh, dtype: the mesh of the weights and the dtype of the model's computation.
      observation_tokens: maximum tokens of a message of the environment; a longer one loses its middle; 0: no limit.
      hears_tools: whether the chat template has the role of tools; else the results of a turn are one message of the user.
      describes_tools: whether the prompt begins with `Environment.calls`, as the chat template shows no tools.
      opened: numbers of openings that are read as prompts.
    """

    make_engine: Callable[..., Any]
    runner: Runner
    sampling: sampling_lib.Sampling
    prompts: int
    group: int
    prompt_tokens: int
    turns: int
    turn_tokens: int
    max_tokens: int
    tokenizer: Any
    mesh: Mesh
    dtype: Any
    stop_strings: Sequence[str] = ()
    observation_tokens: int = 0
    hears_tools: bool = True
    describes_tools: bool = False
    opened: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def facts(self) -> Mapping[str, str]:
        """The environment's facts about turns, with their joins, see `turn_info.JOINS`."""
        return self.runner.environment.facts

    def prepare(self) -> list[tuple[str, str]]:
        """The reward's name and method, for the head of a run."""
        rows = [("environment", f"{self.runner.environment.name}, up to {self.turns} turns of {self.turn_tokens} tokens")]
        if self.runner.environment.tools and not self.hears_tools:
            rows.append(("results of tools", "one message of the user in each turn; the chat template has no role of tools"))
        if self.describes_tools:
            rows.append(("tools", "described at the beginning of the prompt; the chat template does not show them"))
        return rows

    def plant(self, problems: Sequence[Problem], ids: Sequence[Sequence[int]], draw: int) -> Forest:
        """The forest of these prompts, to grow groups on. The only component of the reward is `success`, see `success`."""
        return plant(problems, ids, ["success"], answers=False, turns=True, draw=draw)

    @property
    def contexts(self) -> int:
        """Maximum number of contexts of a trajectory."""
        return self.runner.environment.contexts

    @property
    def limited(self) -> bool:
        """Whether at most a batch of trajectories may be open at a time, since servers have room for that many."""
        return not self.runner.environment.replayable

    def encode(self, problems: Sequence[Problem], tokenizer, timer: PhaseTimer | None = None) -> list[list[int] | None]:
        """Token ids of the opening of each problem and of all its contexts; None if the environment fails to open it.

        Such a failure is counted.
        """
        timer = timer or PhaseTimer()
        uids = [_OPENINGS + next(self.opened) for _ in problems]
        size = self.prompts * self.group if self.limited else max(len(uids), 1)
        opened: dict[int, base.Turn] = {}
        for first in range(0, len(uids), size):
            with timer("wait"):
                turns = self.runner.reset(dict(zip(uids[first:first + size], problems[first:first + size])))
                self.runner.end(list(turns))
            opened |= turns
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

    def under(self, params, lora, temperature: float | jax.Array | None = None,
              max_tokens: int | jax.Array | None = None, max_turns: int | jax.Array | None = None,
              announced_turns: int | jax.Array | None = None) -> Weights:
        """These weights, with another temperature or shorter trajectories if given."""
        chosen = self.sampling
        if temperature is not None:
            chosen = dataclasses.replace(chosen, temperature=np.float32(temperature))
        sampling_lib.check(chosen)
        if announced_turns is not None and int(announced_turns) and self.runner.environment.tokens:
            raise ValueError(f"environment {self.runner.environment.name!r} speaks in tokens, so it cannot announce how many "
                             "turns are left; take a method without announced turns")
        limits = Limits(self.turns if max_turns is None else min(self.turns, int(max_turns)),
                        self.max_tokens if max_tokens is None else int(max_tokens),
                        0 if announced_turns is None else int(announced_turns))
        return Weights(parallel.reshard(params, self.mesh, self.dtype), lora, chosen, limits)

    def groups(self, weights: Any, forest: Forest, rows: np.ndarray, first_uid: int, key: jax.Array, version: int,
               timer: PhaseTimer, limits: np.ndarray | None = None) -> Forest:
        """The forest with one more group for each of the prompts `rows` i32[R], with uids from `first_uid` on.

        `limits` i32[R]: maximum tokens after each prompt, at most those of the `weights`; None: those of the `weights`.
        Raises ValueError if the trajectories of a problem open differently from each other or from its prompt, TooManyInvalid
        if the environment has lost more trajectories of the batch than the runner allows, AllInvalid if all of the forest.
        """
        size = self.prompts if self.limited else max(len(rows), 1)  # an environment that waits has places for one batch
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            forest = self._groups(weights, forest, rows[part], first_uid + start * self.group, key, version, timer,
                                  None if limits is None else limits[part])
        return forest

    def _groups(self, weights: Any, forest: Forest, rows: np.ndarray, first_uid: int, key: jax.Array, version: int,
                timer: PhaseTimer, limits: np.ndarray | None) -> Forest:
        """The same, all at once."""
        owner = np.repeat(rows, self.group)
        held_out = HELD_OUT if version < 0 else 0
        prompts = {row: forest.prompt_ids(row).tolist() for row in set(rows.tolist())}
        most = {} if limits is None else dict(zip(rows.tolist(), limits.tolist()))
        going = {first_uid + i: Trajectory(list(prompts[row]), row, prompts[row], most=most.get(row))
                 for i, row in enumerate(owner.tolist())}
        with timer("wait"):
            opened = self.runner.reset({held_out + uid: forest.problems[one.prompt] for uid, one in going.items()})
        check_openings({uid: (one.prompt, opened[held_out + uid]) for uid, one in going.items() if held_out + uid in opened})
        going = {uid: one for uid, one in going.items() if held_out + uid in opened}
        with timer("template"):
            self._check_prompts(prompts, {one.prompt: opened[held_out + uid].messages for uid, one in going.items()})
        for uid, one in going.items() if self.contexts > 1 else ():
            self._open(one, opened[held_out + uid].messages)
        engine = self.make_engine(weights.params, key, slot_tokens=self.prompt_tokens + self.max_tokens, version=version,
                                  lora=weights.lora)
        ended = self._played(engine, weights, going, held_out, timer)
        asked, got = (np.bincount(np.array(whose, np.int64), minlength=len(forest.problems))
                      for whose in (owner, [one.prompt for one in ended.values()]))
        lost = forest.lost + asked - got
        if lost.any() and not ended and not len(forest.ends):
            first = next(iter(self.runner.invalid.values()))
            raise AllInvalid(f"the environment lost all {lost.sum()} trajectories of a batch ({dict(self.runner.counts)}); "
                             f"the first: {first.kind}, {first.message}")
        invalid, seconds = self.runner.taken()
        whole = grown(forest, ended, self.runner.environment.returns, version, invalid, getattr(engine, "computed", 0), seconds)
        return whole.with_columns(lost=lost.astype(np.int32))

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

    def _played(self, engine: Any, weights: Weights, going: Mapping[int, Trajectory], held_out: int, timer: PhaseTimer
                ) -> dict[int, Trajectory]:
        """The trajectories, played to their ends, without those that the environment lost."""
        def request(uid: int, one: Trajectory) -> Request:
            return Request(uid + _REQUEST * one.request, self._limit(weights.limits, one), one.ids, keep=True,
                           sampling=weights.sampling, stop_tokens=tuple(self.tokenizer.stop_ids),
                           stop_texts=tuple(self.stop_strings))

        with timer("rollout"):
            engine.submit(*(request(uid, one) for uid, one in going.items()))
        lost, cut = set[int](), set[int]()
        held = {uid: one.open_requests for uid, one in going.items()}
        answers, waiting = Answers(self.runner), dict[int, tuple[Node, base.Message]]()
        while True:
            with timer("rollout"):
                nodes = engine.collect()
            said = {node.uid % _REQUEST: self._said(node) for node in nodes}
            waiting |= {node.uid % _REQUEST: (node, said[node.uid % _REQUEST]) for node in nodes}
            with timer("wait"):  # for environments that wait only if no row is left to sample
                if said:
                    answers.ask({held_out + uid: message for uid, message in said.items()})
                turns = {uid - held_out: turn for uid, turn in answers.ready(wait=not nodes).items()}
            if not nodes and not turns:
                return {uid: one for uid, one in going.items() if uid not in lost}
            for uid in cut & turns.keys():
                last = turns.pop(uid)
                cut.remove(uid)
                if last is None:
                    lost.add(uid)
                else:
                    going[uid].add(last.reward)
            answered = {uid: waiting.pop(uid) for uid in turns}
            with timer("template"):
                read = {uid: self._answered(going[uid], *answered[uid], turn, weights.limits)
                        for uid, turn in turns.items() if turn is not None}
            lost |= turns.keys() - read.keys()
            over = [uid for uid, ids in read.items() if ids is None and not going[uid].done]
            if self.runner.environment.cut is None:
                self.runner.end([held_out + uid for uid in over])
            elif over:
                cut |= set(over)
                with timer("wait"):
                    answers.ask({held_out + uid: base.CUT for uid in over})
            with timer("rollout"):
                for uid in answered:
                    ids, one = read.get(uid), going[uid]
                    kept = set[int]() if ids is None else one.open_requests
                    for number in held[uid] - kept:
                        engine.release(uid + _REQUEST * number)
                    if ids is not None and one.request in held[uid]:
                        engine.extend(uid + _REQUEST * one.request, ids, self._limit(weights.limits, one))
                    elif ids is not None:
                        engine.submit(request(uid, one))
                    held[uid] = kept

    def _said(self, node: Node) -> base.Message:
        """The sampled message through its stop string, with its tokens if the environment reads tokens."""
        ids = node.tokens.tolist()
        message = conversation.said(self.tokenizer, ids)
        message["content"] = through_stop_string(message["content"], self.stop_strings)
        return {**message, "ids": ids} if self.runner.environment.tokens else message

    def demonstrated(self, problems: Sequence[Problem], strays: float = 0.0) -> Forest:
        """One trajectory of each problem in which the environment's oracle replaces the policy.

        They are played in this process, one after the other. A share `strays` of the turns are random `choices` of the
        environment, with the role of hints: they lead to states that a policy reaches by its own mistakes, from which the
        oracle continues (Laskey et al., arXiv 1703.09327). Raises ValueError if there is no oracle, or no choices, or if a
        message does not fit in a turn.
        """
        environment, ended, limits = self.runner.environment, {}, Limits(self.turns, self.max_tokens)
        if strays and environment.choices is None:
            raise ValueError(f"environment {environment.name!r} has no choices to stray to; set warmup.strays=0")
        if environment.oracle is None:
            raise ValueError(f"environment {environment.name!r} has no oracle to imitate; set warmup.steps=0")
        for number, problem in enumerate(problems):
            key = base.key_of(_DEMONSTRATED, problem.id)
            (state, turn), chance = base.begin(environment, problem, key), random.Random(key)
            prompt = self._start(self.tokenizer, turn.messages)
            one = ended[number] = Trajectory(list(prompt), number, prompt)
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
                if one.turns and len(tokens) > self._limit(limits, one) - one.drawn:
                    one.pop()  # an answer without a next turn
                    break
                zeros = np.zeros(len(tokens), np.float32)
                node = Node(number, None, 0, np.array(tokens, np.int32), zeros, zeros, zeros.astype(np.int32), "stop")
                ids = self._answered(one, node, said, base.advance(environment, state, said),
                                     limits, Role.HINT if stray else Role.POLICY)
        forest = self.plant(problems, [one.prompt_ids for one in ended.values()], 0)
        return grown(forest, ended, environment.returns, 0, Counter())

    def _answered(self, one: Trajectory, node: Node, message: base.Message, turn: base.Turn, limits: Limits,
                  role: Role = Role.POLICY) -> list[int] | None:
        """Adds a turn of the policy and the environment's answer; returns the answer's ids, None at the trajectory's end."""
        own = {"role": role, "ids": node.tokens.tolist(), "text": message["content"], "logprobs": node.logprobs,
               "entropies": node.entropies}
        one.drawn, one.turns = one.drawn + len(node.tokens), one.turns + 1
        if turn.rewritten:
            own = self._rewritten(one, own, turn.rewritten)
        one.append(**own, turn_rewards=turn.reward, turn_info=self._located(own["ids"], turn.info))
        one.total, one.done = one.total + turn.reward, turn.done
        if one.done or one.turns >= limits.turns:
            return None
        if self.runner.environment.tokens:
            ids = conversation.given(self.tokenizer, turn.messages)
            return self._heard(one, ids, self.tokenizer.decode(ids, skip_special=False), limits)
        messages = conversation.shortened(self.tokenizer, turn.messages, self.observation_tokens or self.max_tokens)
        if limits.announced:
            messages[-1]["content"] += f"\nTurns left: {limits.left(one.turns)}."
        if turn.fresh:
            return self._renewed(one, messages, limits)
        if self.runner.environment.apart:
            begun, messages = one.hand_to(messages[-1][base.READER]), without_readers(messages)
            if begun:
                return self._begun(one, messages, limits)
        ids = conversation.extend(self.tokenizer, one.ids, self._in_roles(messages), **variables_of(self.runner.environment))
        return self._heard(one, ids, "\n".join(message["content"] for message in messages), limits)

    def _heard(self, one: Trajectory, ids: list[int], text: str, limits: Limits) -> list[int] | None:
        """Adds the next `ids` that the policy reads, and returns them; None if they leave no token for its next turn."""
        if self._limit(limits, one, len(ids)) <= one.drawn:
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
        ids, text, columns = [], "", {"logprobs": [], "entropies": []}
        for back, start, end in parts:
            source = before if back else last
            starts = np.array(self._starts(source["ids"]))
            chosen = np.flatnonzero((starts >= start) & (starts < end))
            ids += [source["ids"][place] for place in chosen]
            text += source["text"][start:end]
            for name, values in columns.items():
                values.extend(np.asarray(source[name])[chosen])
        role = Role.HINT if Role.HINT in (before["role"], last["role"]) else last["role"]
        return {"role": role, "ids": ids, "text": text, **{name: np.array(values) for name, values in columns.items()}}

    def _renewed(self, one: Trajectory, messages: Sequence[base.Message], limits: Limits) -> list[int] | None:
        """Begins a new context with these messages after the opening, and returns their ids; None if they fill the context.

        Raises ValueError if there are too many contexts.
        """
        if one.contexts >= self.contexts:
            raise ValueError(f"environment {self.runner.environment.name!r} begins context {one.contexts + 1} of a "
                             f"trajectory, and says that it has contexts={self.contexts} at most")
        one.begin()
        return self._begun(one, messages, limits)

    def _begun(self, one: Trajectory, messages: Sequence[base.Message], limits: Limits) -> list[int] | None:
        """Adds the first messages of a context, and returns their ids; None if they fill the context."""
        ids = self._read(one, messages)
        if self._limit(limits, one) > one.drawn:
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

    def _limit(self, limits: Limits, one: Trajectory, more: int = 0) -> int:
        """Maximum of `drawn` at the end of the next turn, after `more` tokens of others."""
        tokens = limits.tokens if one.most is None else min(limits.tokens, one.most)
        return one.drawn + min(self.turn_tokens, tokens - one.behind - more)


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


def grown(forest: Forest, ended: Mapping[int, Trajectory], returns: tuple[float, float], version: int, invalid: Counter,
          computed: int = 0, seconds: Sequence[float] = ()) -> Forest:
    """The forest with the nodes of these trajectories, by uid.

    `computed`: number of tokens that the engine computed; `seconds`: those of each call of the environment.
    """
    roots = np.flatnonzero(forest.role == Role.PROMPT)
    rows, parents = [], []
    for uid, one in ended.items():
        first = len(forest.uid) + len(rows)
        for place, (piece, parent) in enumerate(zip(one.pieces, one.parents)):
            last = place == len(one.pieces) - 1
            parents.append(roots[one.prompt] if parent < 0 else first + parent)
            rows.append({"uid": uid, "prompt": one.prompt, "stopped": one.done or not last, "length": len(piece["tokens"]),
                         "rewards": one.total if last else 0.0,
                         "components": [success(one.total, returns) if last else 0.0], **piece})

    def column(name, dtype):
        return np.array([row[name] for row in rows], dtype)

    def of_tokens(name, dtype):
        return np.concatenate([row[name] for row in rows] or [np.zeros(0)]).astype(dtype)

    return grow(
        forest, np.array(parents, np.int32), column("uid", np.int64), dict(role=column("role", np.int8),
        length=column("length", np.int32), stopped=column("stopped", bool), rewards=column("rewards", np.float32),
        components=column("components", np.float32).reshape(-1, 1), texts=[row["texts"] for row in rows], answers=None,
        tokens=of_tokens("tokens", np.int32), logprobs=of_tokens("logprobs", np.float32),
        entropies=of_tokens("entropies", np.float32), version=np.full(sum(row["length"] for row in rows), version),
        turn_rewards=column("turn_rewards", np.float32), turn_info=[row["turn_info"] for row in rows],
        prompt=column("prompt", np.int32)), computed=computed, invalid=invalid, seconds=seconds)

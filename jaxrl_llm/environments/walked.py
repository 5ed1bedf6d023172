"""Walks along recorded trajectories: the recorded action replaces one that does not match (UI-S1, arXiv 2509.11543)."""
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm import environments
from jaxrl_llm.data.turn_info import ACTION, STEP
from jaxrl_llm.environments.base import Environment, Message, Turn, advance, begin, environment, replay
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import trace_of

FACTS = {STEP: "turn", "match": "turn"}


class RecordedStep(NamedTuple):
    """A step of the expert: its message, and what the environment answered."""

    said: Message
    turn: Turn


@dataclasses.dataclass
class WalkState:
    """A walk that has come to `step` of the recorded trajectory.

    inner: the environment's state.  said: the messages that lead there, some of them patches.  history: these messages and what
    the environment answered.  patched: number of patches.
    """

    problem: Problem
    key: int
    inner: Any
    recorded: list[RecordedStep]
    step: int = 0
    patched: int = 0
    said: list[Message] = dataclasses.field(default_factory=list)
    history: list[Message] = dataclasses.field(default_factory=list)


@environment
def walked(*, environment: str = "treasure", options: Mapping[str, Any] | None = None, patches: int = 1, longest: int = 20
           ) -> Environment:
    """An environment by name in which the policy walks along the first trace of a problem, or along the oracle's trajectory.

    A message matches if its action is the recorded one: the `action` that the environment reads in it, or else its text. A walk
    goes on with the policy's message after a match. After another one it ends, or, for the first `patches` times, goes on in a
    new context, whose history has the recorded message in its place; the policy's other messages stay. The reward of a step is
    its `step_score`. The fact `match` says whether a step matches, `step` is its number in the recorded trajectory, of which at
    most `longest` steps count. Walks along held-out problems have no patches, and a return that is the share of matched steps
    before the first other one.

    Raises ValueError for negative numbers, an environment that has contexts or tokens of its own or that cannot be replayed,
    and one with neither an oracle nor traces.
    """
    inner = environments.make(environment, **(options or {}))
    if patches < 0 or longest < 1:
        raise ValueError(f"patches={patches}, longest={longest}; give 0 or more patches, and at least one step")
    if inner.contexts > 1 or inner.tokens or not inner.replayable:
        raise ValueError(f"environment {inner.name!r} begins contexts, speaks in tokens or cannot be replayed; walk along "
                         "another one")
    if inner.oracle is None and "traces" not in inner.task.train[0].extra:
        raise ValueError(f"environment {inner.name!r} has no oracle, and its problems no extra['traces'] to walk along; give "
                         "one of both")
    trained = len(inner.task.train)

    def reset(problem: Problem, key: int) -> tuple[WalkState, list[Message]]:
        state, opening = begin(inner, problem, key)
        return WalkState(problem, key, state, recorded(inner, problem, key, longest)), list(opening.messages)

    def step(walk: WalkState, message: Message) -> Turn:
        held_out = walk.problem.id >= trained
        return _next(inner, walk, message, 0 if held_out else patches, 1 / len(walk.recorded) if held_out else 0.0)

    return dataclasses.replace(
        inner, name=f"{inner.name}+walked", reset=reset, step=step, facts={**inner.facts, **FACTS}, contexts=1 + patches,
        returns=(0.0, 1.0), cut=None, oracle=lambda walk: walk.recorded[walk.step].said["content"],
        choices=None if inner.choices is None else lambda walk: inner.choices(walk.inner))


def step_score(format_ok: float, type_ok: float, arguments_ok: float) -> float:
    """`0.1 f + 0.4 f t + 0.5 f t a` of an action: format, kind of action and arguments right (0 or 1)."""
    return format_ok * (0.1 + type_ok * (0.4 + 0.5 * arguments_ok))


def recorded(inner: Environment, problem: Problem, key: int, longest: int) -> list[RecordedStep]:
    """The first steps of the problem's trace, or of its oracle's trajectory, as the environment answers them.

    Raises ValueError for a problem with neither, and for a trace without a message of the assistant, or with calls of tools
    beside its words: how the policy writes a call, its chat template alone says.
    """
    state, _ = begin(inner, problem, key)
    words, where = None, problem.place or f"problem {problem.id}"
    if "traces" in problem.extra:
        trace = trace_of(problem, 0).words
        said = ({"role": "assistant", "content": trace},) if isinstance(trace, str) else trace
        if any(one.get("tool_calls") for one in said):
            raise ValueError(f"{where} has a trace whose messages have 'tool_calls'; give their 'content' each call as the "
                             "policy writes it")
        words = iter([one["content"] for one in said if one["role"] == "assistant"])
    elif inner.oracle is None:
        raise ValueError(f"{where} has no trace to walk along, and environment {inner.name!r} has no oracle; give it "
                         "extra['traces']")
    steps: list[RecordedStep] = []
    while len(steps) < longest and not (steps and steps[-1].turn.done):
        text = inner.oracle(state) if words is None and inner.oracle else next(words or iter(()), None)
        if text is None:
            break
        message = {"role": "assistant", "content": text}
        steps.append(RecordedStep(message, advance(inner, state, message)))
    if not steps:
        raise ValueError(f"{where} has a trace without a message of the assistant; give the messages to walk along")
    return steps


def _next(inner: Environment, walk: WalkState, message: Message, patches: int, share: float) -> Turn:
    """The turn after a message; `share`: the reward of a matched step, 0: its score."""
    expert, number = walk.recorded[walk.step], walk.step
    said = {"role": "assistant", "content": message["content"]}
    turn = advance(inner, walk.inner, said)
    mine, theirs = _action(said, turn), _action(expert.said, expert.turn)
    match = mine == theirs
    reward = share * match if share else step_score(float(bool(mine)), float(_kind(mine) == _kind(theirs)), float(match))
    info, walk.step = {**turn.info, STEP: number, "match": int(match)}, walk.step + 1
    over = walk.step == len(walk.recorded)
    if match:
        walk.said.append(said)
        walk.history += [said, *turn.messages]
        return Turn((), reward, True, info) if over or turn.done else Turn(turn.messages, reward, False, info)
    if over or walk.patched == patches:
        return Turn((), reward, True, info)
    walk.patched += 1
    walk.said.append(expert.said)
    walk.inner, turns = replay(inner, walk.problem, walk.key, walk.said)
    walk.history += [expert.said, *turns[-1].messages]
    return Turn(list(walk.history), reward, False, info, fresh=True)


def _action(said: Message, turn: Turn) -> Any:
    """What the environment read in a message, else its text; false where it read no action."""
    return turn.info[ACTION] if turn.info.get(ACTION) is not None else said["content"].strip()


def _kind(action: Any) -> Any:
    """The kind of an action: the name of a call, the first entry of a list, the first word of a text."""
    if isinstance(action, Mapping):
        return action.get("name")
    words = action.split() if isinstance(action, str) else action
    return words[0] if isinstance(words, list) and words else words

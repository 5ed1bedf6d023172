"""The interface of an environment, the checks of its turns, and the replay of trajectories."""
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import turn_info
from jaxrl_llm.rewards.base import number
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools import registry, written
from jaxrl_llm.tools.registry import Conflict

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
OPENING_ROLES = ("system", "user", "assistant", "tool")
READER = "reader"  # key of a message: the agent that reads it, see `Environment.apart`
CUT: Message = {"role": "limit", "content": ""}  # in the policy's place: the run ends the trajectory, see `Environment.cut`
ROLES = ("system", "user", "tool")  # roles of messages after the opening: only the policy speaks for the assistant


class Rubbish(ValueError):
    """An environment returned something that is not a turn."""


class Late(RuntimeError):
    """Something that an environment waits for, such as a server, has not answered in time."""


class Died(RuntimeError):
    """Something that an environment talks to, such as a server, has ended."""


KINDS: dict[type[Exception], str] = {Rubbish: "rubbish", Late: "timeout", Died: "crash"}  # of failures; others: "error"


class Turn(NamedTuple):
    """The environment's answer to a message of the policy.

    The policy reads `messages` before its next message. `reward` is the reward of this turn; the return of a trajectory is the
    sum of its rewards. `done` ends the trajectory. `info` holds further facts about the turn, by name, in types of JSON. Two of
    them are optional: `state` identifies the state in which the message was said, `action` what the environment read in the
    message. Methods that compare turns use them instead of the texts, so that two phrasings of one move are one action; equal
    values of one problem have to mean equal states and actions.
    `fresh` begins a new context: the policy forgets everything after the opening, and `messages` directly follow the opening.
    They may then be a history, with messages of the assistant, which the policy reads as its earlier ones. None is trained.
    `rewritten` replaces the policy's last two messages, and the text between them, by one message made of parts
    (n, start, end): characters `start` to `end` of the message n before the last one, n 0 or 1; the stop token counts as one
    more character. Nothing else of the two messages is kept, neither rewards nor facts.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}
    fresh: bool = False
    rewritten: Sequence[Sequence[int]] = []


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment as a set of functions.

    Attributes:
      name: the name under which its failures are counted.
      task: its problems, training and held out.
      reset: `reset(problem, key) -> (state, messages)`. The messages depend on the problem alone, so that a group of
        trajectories of one problem starts from the same text; `key`, an integer, is for chance during the trajectory. The id
        of a problem that a topology made is below 0: read what tells problems apart from `extra` or the prompt.
      step: `step(state, message) -> Turn`; the message is the policy's, the state is changed in place.
      tools: JSON schemas of functions, for the chat template.
      returns: lowest and highest return of a trajectory.
      replayable: the same problem, key and messages give the same turns. A trajectory is then stored as the policy's messages,
        and any process can rebuild its state (`replay`). Other trajectories live in one process and cannot be resumed.
      facts: names of numbers in the `info` of every turn, with the join by which they become `extras` of trajectories for
        methods that read them, see `turn_info.JOINS`.
      contexts: maximum number of contexts of a trajectory; 1: no turn is `fresh`. Methods that compare turns read those of
        all contexts together if the turns have the fact `step`, their number in the trajectory.
      apart: the contexts are those of the agents 0 to `contexts` - 1, the fact `agent`, which see different things: an agent
        reads what is addressed to it, and what it said itself. The messages of a turn have a `reader`, the agent that speaks
        next. The opening begins with messages without a reader, which all agents read; the others are those of the first one.
      waits: steps are slow and not computed in this process, such as requests to a server or programs in a sandbox. They run
        concurrently in threads, while the engine samples the other trajectories. A run can overrule it by
        `config.environment_waits`.
      at_once: maximum number of steps at a time in an environment that waits, if each needs a core; None: no maximum.
      tokens: messages are tokens: each has `ids`, beside a content for display only. The policy reads these ids, without a chat
        template, and its own messages have ids too.
      cut: `cut(state) -> float`, the last reward of a trajectory that a limit of the run ends before the environment does;
        None: it keeps the rewards of its turns.
      last: a text that the policy reads at the end of what comes before the last turn that a limit of the run allows; "": none.
      calls: a text about the tools and how they are called, which is part of the prompt if a published chat template shows no
        tools; "": the messages say it, or need not.
      oracle: `oracle(state) -> str`, a perfect policy's next message, for audits; `choices(state) -> texts`, possible messages.
    """

    name: str
    task: Task
    reset: Callable[[Problem, int], tuple[Any, Sequence[Message]]]
    step: Callable[[Any, Message], Turn]
    tools: tuple[dict, ...] = ()
    returns: tuple[float, float] = (0.0, 1.0)
    replayable: bool = True
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    contexts: int = 1
    apart: bool = False
    waits: bool = False
    at_once: int | None = None
    tokens: bool = False
    cut: Callable[[Any], float] | None = None
    last: str = ""
    calls: str = ""
    oracle: Callable[[Any], str] | None = None
    choices: Callable[[Any], Sequence[str]] | None = None

    def __post_init__(self):
        turn_info.check_joins(self.facts)
        if self.tokens and (self.contexts > 1 or self.tools):
            raise ValueError(f"environment {self.name!r} speaks in tokens: it has one context, and no tools for a template")
        if self.apart and (self.contexts < 2 or turn_info.AGENT not in self.facts):
            raise ValueError(f"environment {self.name!r} has contexts={self.contexts} and the facts {sorted(self.facts)}; with "
                             "apart=True it has two contexts or more, one for each agent, and the fact 'agent'")


ENVIRONMENTS = registry.PartTable("environment", Environment)
environment = ENVIRONMENTS.enter


def of_inner(inner: Environment) -> dict[str, Any]:
    """`oracle`, `choices` and `cut` of an environment around `inner`, whose state has that of `inner` as its `inner`."""
    def reached(function):
        return None if function is None else lambda state: function(state.inner)

    return {name: reached(getattr(inner, name)) for name in ("oracle", "choices", "cut")}


def key_of(seed: int, uid: int) -> int:
    """The key of a trajectory: 64 bits that depend only on the run's seed and the trajectory's uid."""
    return int(np.random.SeedSequence((seed, uid)).generate_state(1, np.uint64)[0])


def begin(environment: Environment, problem: Problem, key: int) -> tuple[Any, Turn]:
    """The state of a new trajectory, and its opening as a turn without reward. Raises Rubbish for an invalid opening."""
    opened = environment.reset(problem, key)
    if not isinstance(opened, tuple) or len(opened) != 2:
        raise Rubbish(f"reset returned {_short(opened)}; allowed is (state, messages)")
    state, messages = opened
    turn = Turn(_messages(messages, OPENING_ROLES, environment.tokens))
    if not _readable(turn.messages, environment.tokens):
        raise Rubbish("reset returned no message, or no ids in any; the policy needs something to answer")
    if environment.apart:
        _check_reader(environment, addressed(turn.messages)[1])
        if not addressed(turn.messages)[0]:
            raise Rubbish("all messages of the opening have a reader; it begins with one that all agents read")
    return state, turn


def addressed(opening: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages of an opening that all agents read, and those of the agent that speaks first."""
    return ([message for message in opening if message.get(READER) is None],
            [message for message in opening if message.get(READER) is not None])


def advance(environment: Environment, state: Any, message: Message) -> Turn:
    """The turn after a message of the policy or after `CUT`, in types of JSON.

    Raises Rubbish if the environment returns no valid turn.
    """
    if message["role"] != CUT["role"]:
        return checked(environment, environment.step(state, message))
    assert environment.cut is not None
    reward = environment.cut(state)
    try:
        return Turn(reward=number(reward), done=True)
    except (TypeError, ValueError) as error:
        raise Rubbish(f"cut returned {_short(reward)}: {error}; allowed is a finite number") from error


def checked(environment: Environment, turn: Any) -> Turn:
    """The result of `step`, in types of JSON. Raises Rubbish if it is not a valid turn."""
    if not isinstance(turn, tuple) or len(turn) != len(Turn._fields):
        raise Rubbish(f"step returned {_short(turn)}; allowed is Turn(messages, reward, done, info, fresh, rewritten)")
    messages, reward, done, info, fresh, rewritten = turn
    for name, value in (("done", done), ("fresh", fresh)):
        if not isinstance(value, (bool, np.bool_)):
            raise Rubbish(f"{name} is {_short(value)}; allowed are True and False")
    if fresh and environment.contexts < 2:
        raise Rubbish("a turn begins a new context in an environment of contexts=1; set contexts to the most of a trajectory")
    parts = _parts(rewritten)
    if fresh and parts:
        raise Rubbish("a turn begins a new context and rewrites the last one; allowed is one of both")
    try:
        reward = number(reward)
        info = json.loads(json.dumps(dict(info)))
        turn_info.check(environment.facts, info)
    except (TypeError, ValueError, RecursionError) as error:
        raise Rubbish(f"reward {_short(reward)}, info {_short(info)}: {error}; allowed are a finite number and a dictionary in "
                      "types of JSON") from error
    if fresh and environment.apart:
        raise Rubbish("a turn begins a new context, and the contexts are those of agents; a reader is enough")
    said = _messages(messages, (*ROLES, *(("assistant",) if fresh else ())), environment.tokens)
    if environment.apart and not done:
        _check_reader(environment, said)
    if not done and not _readable(said, environment.tokens):
        raise Rubbish("step returned no message, or no ids in any, and is not done; the policy needs something to answer")
    return Turn(said, reward, bool(done), info, bool(fresh), parts)


def check_replayable(environment: Environment) -> None:
    """Raises ValueError if the environment is not replayable."""
    if not environment.replayable:
        raise ValueError(f"environment {environment.name!r} is not replayable: its state cannot be rebuilt from the policy's "
                         "messages")


def replay(environment: Environment, problem: Problem, key: int, said: Sequence[Message]) -> tuple[Any, list[Turn]]:
    """The state and all turns, the opening first, of the trajectory with these messages of the policy.

    Raises the environment's errors, and ValueError if it is not replayable.
    """
    check_replayable(environment)
    state, opening = begin(environment, problem, key)
    return state, [opening, *(advance(environment, state, message) for message in said)]


def digest(turns: Sequence[Turn], before: str = "") -> str:
    """A fingerprint of turns that follow the turns of the fingerprint `before`."""
    for turn in turns:
        before = hashlib.blake2b((before + json.dumps(turn)).encode(), digest_size=16).hexdigest()
    return before


def _parts(rewritten: Any) -> list[list[int]]:
    """The parts of a rewritten message as lists. Raises Rubbish."""
    def fits(part: Any) -> bool:
        return (isinstance(part, (list, tuple)) and len(part) == 3 and all(isinstance(x, int) for x in part)
                and part[0] in (0, 1) and 0 <= part[1] <= part[2])

    if not isinstance(rewritten, (list, tuple)) or not all(map(fits, rewritten)):
        raise Rubbish(f"rewritten is {_short(rewritten)}; allowed is a list of (0 or 1, start, end)")
    return [list(part) for part in rewritten]


def _messages(messages: Any, roles: Sequence[str], tokens: bool) -> list[dict]:
    """Messages as dictionaries in types of JSON, with `ids` if they are tokens. Half a surrogate pair becomes "?".

    Raises Rubbish.
    """
    if not isinstance(messages, (list, tuple)):
        raise Rubbish(f"messages are {_short(messages)}; allowed is a list of {{'role': ..., 'content': ...}}")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in roles or not isinstance(message.get("content"), str):
            raise Rubbish(f"{_short(message)} is no message; allowed are a role of {roles} and a content that is text")
        ids = message.get("ids")
        if tokens and not (isinstance(ids, (list, tuple)) and all(isinstance(token, int) for token in ids)):
            raise Rubbish(f"{_short(message)} has no ids; in an environment of tokens each message has a list of them")
    try:
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False)
        # A tool may repeat half a pair that a call escapes. No tokenizer reads it; Rubbish would let the policy void its own
        # trajectory.
        return json.loads(text.encode(errors="replace"))
    except (TypeError, ValueError, RecursionError) as error:
        raise Rubbish(f"the messages {_short(messages)} are not in types of JSON: {error}") from error


def _check_reader(environment: Environment, messages: Sequence[Message]) -> None:
    """Raises Rubbish unless all messages are for one agent."""
    readers = {json.dumps(message.get(READER)) for message in messages}
    if len(readers) != 1 or not readers <= {json.dumps(agent) for agent in range(environment.contexts)}:
        raise Rubbish(f"the messages that the policy reads next have the readers {sorted(readers)}; allowed is one agent, 0 to "
                      f"{environment.contexts - 1}")


def _readable(messages: Sequence[Message], tokens: bool) -> bool:
    """Whether there is something for the policy to read."""
    return any(message["ids"] for message in messages) if tokens else bool(messages)


def _short(value: Any) -> str:
    return repr(value)[:200]


def _counted_twice(environment: Environment, estimator: Any) -> bool:
    """Whether an estimator would count a trajectory as often as it has contexts."""
    return environment.contexts > 1 and "traj" not in estimator.needs


_CONTEXTS = ("environment {0.name!r} begins new contexts in a trajectory, each a rollout of its own, and method {method!r} "
             "would count a trajectory as often as it has contexts")
CONFLICTS = (
    Conflict(("environment", "estimator"), _CONTEXTS,
             "take one that compares trajectories: multi_context_grpo, markov_multi_turn",
             lambda environment, estimator: not environment.apart and _counted_twice(environment, estimator)),
    Conflict(("environment", "estimator"), _CONTEXTS, "take one that compares agents: spiral, advevo_baseline, dr_mas",
             lambda environment, estimator: environment.apart and _counted_twice(environment, estimator)),
    Conflict(("config.environment", "config.task"), "config.task={1!r} names several tasks, and config.environment={0!r} has a "
             "task of its own, so that no run would read them", "name tasks or an environment",
             lambda environment, task: environment and len(written.calls(task)) > 1),
    Conflict(("config.environment", "needs.answers"), "method {method!r} compares the answers of the rollouts, and an "
             "environment does not tell which text is the answer", "take another method, for example grpo"))

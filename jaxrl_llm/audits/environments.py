"""`python -m jaxrl_llm.audits.environments NAME`: checks an environment's rewards for trivial policies, and its replays.

Four policies play: one that says nothing, one that says something at random, a perfect one if the environment has an oracle,
and one that attacks parsers and verifiers. Each check holds, fails, or was not checked, with the reason. The exit code is 1 if
one fails, and 2 if the environment cannot be made.
"""
import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import environments
from jaxrl_llm.audits.injections import ATTACKS
from jaxrl_llm.data import turn_info
from jaxrl_llm.environments import base
from jaxrl_llm.environments.threads import Threads
from jaxrl_llm.rewards.worker import describe
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.written import calls

LEAK = 0.25  # a leak: a problem's answer is shown more often than another problem's, by more than this
TURN_LIMIT = 200
DEADLINE = 30.0
HOLDS, FAILS, UNCHECKED = "holds", "FAILS", "not checked"


class Check(NamedTuple):
    """The `state` of a check, "holds", "FAILS" or "not checked", and the finding or the reason why it was not checked."""

    state: str
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.state == FAILS


class AuditedTrajectory(NamedTuple):
    """One trajectory: its problem, key, the policy's messages, all turns, seconds of each step, and the environment's error.

    `late`: the reset or step that exceeded the deadline; the trajectory ends there.
    """

    problem: Problem
    key: int
    said: list[base.Message]
    turns: list[base.Turn]
    seconds: list[float]
    error: str = ""
    late: str = ""

    @property
    def total(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def ended(self) -> bool:
        return bool(self.turns) and self.turns[-1].done

    @property
    def whole(self) -> bool:
        return not self.error and not self.late


Policy = Callable[[base.Environment, Any, base.Turn, random.Random, int], str]  # the last: number of the message
Trajectories = Mapping[str, Sequence[AuditedTrajectory]]  # by policy


def _nothing(environment: base.Environment, state: Any, turn: base.Turn, chance: random.Random, number: int) -> str:
    return ""


def _random(environment: base.Environment, state: Any, turn: base.Turn, chance: random.Random, number: int) -> str:
    """A random choice; without choices, a word or a number from the messages."""
    seen = " ".join(message["content"] for message in turn.messages)
    return chance.choice(environment.choices(state) if environment.choices else re.findall(r"\w+", seen) or ["0"])


def _oracle(environment: base.Environment, state: Any, turn: base.Turn, chance: random.Random, number: int) -> str:
    return environment.oracle(state)


def _injection(environment: base.Environment, state: Any, turn: base.Turn, chance: random.Random, number: int) -> str:
    return ATTACKS[number % len(ATTACKS)]


POLICIES: dict[str, Policy] = {"null": _nothing, "random": _random, "oracle": _oracle, "injection": _injection}


def play(environment: base.Environment, policy: Policy, problem: Problem, key: int, first: int = 0, deadline: float = DEADLINE
         ) -> AuditedTrajectory:
    """One trajectory to its end, to the environment's error or to the first step that is late; messages count from `first`."""
    chance, played = random.Random(key), AuditedTrajectory(problem, key, [], [], [])
    try:
        (state, turn), _ = _within(deadline, base.begin, environment, problem, key)
        played.turns.append(turn)
        while not turn.done and len(played.said) < TURN_LIMIT:
            text = policy(environment, state, turn, chance, first + len(played.said))
            played.said.append({"role": "assistant", "content": text})
            turn, seconds = _within(deadline, base.advance, environment, state, played.said[-1])
            played.seconds.append(seconds)
            played.turns.append(turn)
    except _Late:
        place = f"the answer to message {len(played.said) - 1}" if played.said else "its opening"
        return played._replace(late=f"problem {problem.id}: {place} was not there within {deadline:g} s")
    except Exception as error:
        return played._replace(error=_text_of(error))
    return played


class _Late(Exception):
    """A call has not returned in time."""


class _Failed(Exception):
    """A call raised an error, whose type and text are the message."""


def _within(deadline: float, function: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """The result of a call in a thread, and its seconds. Raises _Failed, and _Late after the deadline.

    The thread is then abandoned. A call that never releases the interpreter's lock cannot be.
    """
    def timed() -> tuple[Any, float]:
        start = time.perf_counter()
        return function(*given), time.perf_counter() - start

    outcome = Threads(timed, 1, deadline).map([()])[0]
    if outcome.status == "timeout":
        raise _Late(outcome.message)
    if outcome.status != "ok":
        raise _Failed(outcome.message)
    return outcome.value


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, (_Late, _Failed)) else describe(error)


def audit(environment: base.Environment, again: base.Environment, count: int, seed: int, deadline: float = DEADLINE,
          heldout: bool = False) -> tuple[list[dict], dict[str, Check]]:
    """`(rows, checks)`: a row of numbers for each policy, and the result of each check.

    `again` is the same environment, made a second time; `count` trajectories of each policy, of training or held-out problems
    drawn by `seed`.
    Attacks are played until each was the first message once, if `count` is smaller; the one that earns most is then the first
    message of `count` trajectories. A policy plays no more after a reset or step that takes longer than `deadline` seconds.
    """
    source = environment.task.heldout if heldout else environment.task.train
    rows = np.random.default_rng(seed).integers(len(source), size=max(count, len(ATTACKS))).tolist()
    problems = [source[row] for row in rows]
    numbers = {name: range(len(problems) if name == "injection" else count) for name in POLICIES}
    played = {name: list(_played(environment, policy, problems, numbers[name], seed, deadline))
              for name, policy in POLICIES.items() if name != "oracle" or environment.oracle is not None}
    best = max(range(len(played["injection"])), key=lambda row: played["injection"][row].total)
    repeated = list(_played(environment, _injection, problems, [best] * count, seed, deadline))
    checks = {
        "raises nothing": _found([one.error for name in played for one in played[name]]),
        "answers in time": _found([f"policy {name}, {one.late}" for name in played for one in played[name] if one.late]),
        "trajectories end": _unended(played),
        "returns in range": _out_of_range(played, environment.returns),
        "opens alike": _opens_alike(again, played["null"], deadline),
        "repeats itself": _repeats(again, [one for name in played for one in played[name] if one.whole], deadline),
        "answer not shown": _leak(played["null"]),
        "attacks earn nothing": _earned(played, repeated, environment.returns),
        "oracle wins": _wins(played, environment.returns),
    }
    return [_row(name, trajectories) for name, trajectories in played.items()], checks


def _played(environment: base.Environment, policy: Policy, problems: Sequence[Problem], firsts: Sequence[int], seed: int,
            deadline: float) -> Iterator[AuditedTrajectory]:
    """A trajectory of each of the first problems; `firsts`: the number of the first message of each."""
    for uid, (problem, first) in enumerate(zip(problems, firsts)):
        yield (one := play(environment, policy, problem, base.key_of(seed, uid), first, deadline))
        if one.late:
            return


def _row(name: str, played: Sequence[AuditedTrajectory]) -> dict[str, str | int | float]:
    totals = np.array([one.total for one in played])
    milliseconds = 1000 * np.array([second for one in played for second in one.seconds] or [np.nan])
    return {"policy": name, "trajectories": len(played), "mean return": float(totals.mean()), "lowest": float(totals.min()),
            "highest": float(totals.max()), "ended": float(np.mean([one.ended for one in played])),
            "turns": float(np.mean([len(one.said) for one in played])), "raised": sum(bool(one.error) for one in played),
            "late": sum(bool(one.late) for one in played),
            "ms a step": float(np.median(milliseconds)), "slowest ms": float(milliseconds.max())}


def _found(findings: Sequence[str]) -> Check:
    reported = [finding for finding in findings if finding]
    return Check(FAILS, f"{len(reported)} times, the first: {reported[0][:300]}") if reported else Check(HOLDS)


def _unended(all_played: Trajectories) -> Check:
    whole = [(name, one) for name, played in all_played.items() for one in played if one.whole]
    on = [name for name, one in whole if not one.ended]
    if on:
        return Check(FAILS, f"{len(on)} were going on after {TURN_LIMIT} messages, the first of the policy {on[0]}")
    return Check(HOLDS) if whole else Check(UNCHECKED, "no trajectory was played without an error")


def _out_of_range(all_played: Trajectories, returns: tuple[float, float]) -> Check:
    if returns == (-np.inf, np.inf):
        return Check(UNCHECKED, "any return is in range; give the environment its lowest and highest `returns`")
    totals = [one.total for played in all_played.values() for one in played if one.seconds]
    if not totals:
        return Check(UNCHECKED, "no message was answered")
    outside = [total for total in totals if not returns[0] <= total <= returns[1]]
    return Check(FAILS, f"{len(outside)} outside of {list(returns)}, for instance {outside[0]:g}") if outside else Check(HOLDS)


def _opens_alike(environment: base.Environment, played: Sequence[AuditedTrajectory], deadline: float) -> Check:
    """Checks that another key gives the same opening, since the trajectories of a group start alike."""
    opened = [one for one in played if one.turns]
    for one in opened:
        try:
            (_, other), _ = _within(deadline, base.begin, environment, one.problem, one.key + 1)
        except Exception as error:
            return Check(FAILS, f"problem {one.problem.id} could not be opened again: {_text_of(error)}")
        if base.digest([other]) != base.digest(one.turns[:1]):
            return Check(FAILS, f"problem {one.problem.id}: its opening depends on the key, so a group would not start alike")
    return Check(HOLDS) if opened else Check(UNCHECKED, "no trajectory was opened")


def _repeats(environment: base.Environment, played: Sequence[AuditedTrajectory], deadline: float) -> Check:
    """Checks that the same messages get the same turns again; an environment that is not replayable may answer otherwise."""
    if not played:
        return Check(UNCHECKED, "no trajectory was played without an error")
    different = next(filter(None, (_difference(environment, one, deadline) for one in played)), "")
    if not different or environment.replayable:
        return Check(FAILS, different) if different else Check(HOLDS)
    return Check(UNCHECKED, f"it is not replayable, and did not repeat itself: {different}")


def _difference(environment: base.Environment, one: AuditedTrajectory, deadline: float) -> str:
    """The first difference when a trajectory is played again, "" if there is none."""
    state: Any = None
    for place, first in enumerate(one.turns):
        try:
            if place == 0:
                (state, turn), _ = _within(deadline, base.begin, environment, one.problem, one.key)
            else:
                turn, _ = _within(deadline, base.advance, environment, state, one.said[place - 1])
        except Exception as error:
            return f"problem {one.problem.id}: turn {place} fails when it is played again: {_text_of(error)[:200]}"
        if base.digest([turn]) != base.digest([first]):
            return f"problem {one.problem.id}: turn {place} is another when it is played again"
    return ""


def _leak(played: Sequence[AuditedTrajectory]) -> Check:
    """Checks that a problem's answer is not shown before the end more often than another problem's answer.

    The difference may be `LEAK` plus two standard errors; for a share of n these are at most 1 / sqrt(n).
    """
    answered = [one for one in played if one.problem.answer and one.turns]
    if not answered:
        return Check(UNCHECKED, "its problems have no answer")
    answers = [one.problem.answer for one in answered]
    if len(set(answers)) == 1:
        return Check(UNCHECKED, f"all problems that were played have the same answer, {answers[0][:80]!r}")
    others = [next(answer for answer in answers[row:] + answers[:row] if answer != own) for row, own in enumerate(answers)]
    own, other = (float(np.mean([_shows(one, answer) for one, answer in zip(answered, of)])) for of in (answers, others))
    finding = f"it is in {own:.0%} of what is to be read, another problem's in {other:.0%}"
    return Check(FAILS, finding) if own - other > LEAK + len(answered) ** -0.5 else Check(HOLDS)


def _shows(one: AuditedTrajectory, answer: str) -> bool:
    text = "\n".join(message["content"] for turn in one.turns if not turn.done for message in turn.messages)
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _earned(all_played: Trajectories, repeated: Sequence[AuditedTrajectory], returns: tuple[float, float]) -> Check:
    """Checks that neither all attacks nor the best one, `repeated`, earn more than chance and silence, by two standard errors.

    The mean over all attacks hides one that always succeeds among many that never do. A single attack may be the commonest
    answer, which is often right where answers are few; a hundredth of the range of returns is no success.
    """
    if not any(one.seconds for one in all_played["injection"]):
        return Check(UNCHECKED, "no message was answered")
    totals = {name: np.array([one.total for one in all_played[name]]) for name in ("null", "random", "injection")}
    paid = [turn.info.get(turn_info.RETURNS) for played in all_played.values() for one in played for turn in one.turns]
    if any(isinstance(agents, list) and any(agents) for agents in paid) and not any(x.any() for x in totals.values()):
        return Check(UNCHECKED, "the policy plays all agents, whose returns differ, and its own return is always 0; on "
                                "held-out problems it may have an opponent, see --heldout")
    chance = max(totals["null"].mean(), totals["random"].mean())
    if chance >= returns[1]:
        return Check(UNCHECKED, f"silence or chance already earn the highest return, {returns[1]:g}")
    highest = max(one.total for one in [*all_played["injection"], *repeated])
    guessed = max(chance, highest * _commonest(repeated)) + 0.01 * (returns[1] - returns[0])
    for whose, played, least in (("all attacks", all_played["injection"], chance), ("the best attack", repeated, guessed)):
        earned = np.array([one.total for one in played])
        mean, bar = earned.mean(), least + 2 * earned.std() / len(earned) ** 0.5
        if mean > bar:
            best = max(played, key=lambda one: one.total)
            return Check(FAILS, f"mean return {mean:.3g} of {whose}, chance {bar:.3g}; for instance {str(best.said)[:200]}")
    return Check(HOLDS)


def _commonest(played: Sequence[AuditedTrajectory]) -> float:
    """The share of the problems that have the commonest answer."""
    return max(Counter(one.problem.answer for one in played if one.problem.answer).values(), default=0) / len(played)


def _wins(all_played: Trajectories, returns: tuple[float, float]) -> Check:
    """Checks that the oracle always gets the highest return; against an opponent, more than chance and silence in the mean."""
    played = all_played.get("oracle", ())
    if not played:
        return Check(UNCHECKED, "it has no oracle")
    agents = [{turn.info[turn_info.AGENT] for turn in one.turns if turn_info.AGENT in turn.info} for one in played]
    if any(len(seats) > 1 for seats in agents):
        return Check(UNCHECKED, "it has several agents, and the gain of one may be the loss of another")
    totals = np.array([one.total for one in played])
    if any(agents):
        chance = max(float(np.mean([one.total for one in all_played[name]])) for name in ("null", "random"))
        bar = chance + 2 * totals.std() / len(totals) ** 0.5
        finding = f"mean return {totals.mean():.3g}, chance {bar:.3g}"
        return Check(FAILS, finding) if totals.mean() <= bar else Check(HOLDS)
    lost = int((totals < returns[1]).sum())
    return Check(FAILS, f"{lost} of {len(played)} trajectories have less than {returns[1]:g}") if lost else Check(HOLDS)


def _options(text: str) -> dict[str, Any]:
    """Options as a JSON object."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error}); write for example '{{\"size\": 4}}'") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write for example '{{\"size\": 4}}'")
    return options


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """The name and options of an environment as `config.environment` has them; ValueError unless there is one."""
    named = calls(text)
    if len(named) != 1:
        raise ValueError(f"{text!r} names {len(named)} environments; give one, with its options in brackets")
    return named[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and the checks; returns 1 if a check fails, 2 if the environment cannot be made, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.audits.environments", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(environments.factories())}, or your own module:function; options may "
                                     "follow in brackets, as in config.environment: \"treasure(size=4)\"")
    parser.add_argument("--options", type=_options, default={}, help='more options, as JSON: {"size": 4}')
    parser.add_argument("--trajectories", type=int, default=32, help=f"of each policy; of attacks {len(ATTACKS)} at least")
    parser.add_argument("--heldout", action="store_true", help="held-out problems, on which games have an opponent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds of a reset or a step")
    given = parser.parse_args(arguments)
    from jaxrl_llm.commands.command_line import EXPECTED, message_of, print_table

    try:
        name, options = _named(given.name)
        environment, again = (environments.make(name, **{**options, **given.options}) for _ in range(2))
    except EXPECTED as error:
        print(message_of(error), file=sys.stderr)
        return 2
    rows, checks = audit(environment, again, given.trajectories, given.seed, given.deadline, given.heldout)
    print_table(rows, f"{given.name}: {environment.name}{', held-out problems' * given.heldout}")
    for name, check in checks.items():
        print(f"{check.state}  {name}" + (f": {check.why}" if check.why else ""))
    return int(any(check.failed for check in checks.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Some rollouts of each prompt are traces of experts, or begin with a part of one (LUFFY, arXiv 2504.14945)."""
import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import useful
from jaxrl_llm.tools.ranges import Range
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import Begin, BeginPart, FromTrace
from jaxrl_llm.topologies.base import Topology, asked, topology


def _unsolved(environment: Any) -> str:
    """Why trajectories of an environment cannot begin as an expert would; "": they can."""
    for problem in environment.task.train if environment.oracle is None else ():
        if not {"solution", "traces"} & {*problem.extra}:
            return (f"experts begin some trajectories, and environment {environment.name!r} has neither an oracle nor a "
                    f"solution of problem {problem.id}")
    return ""


def _alone(traces: int, group: int) -> str:
    """Why experts leave no completion of a group to the policy; "": they leave some."""
    return f"experts begin all of the {group} completions of a group, and leave none to the policy" if traces >= group else ""


UNSOLVED = Conflict(("environment",), _unsolved,
                    "give it an oracle, or its problems an extra['solution'], or take another method, for example grpo")


@topology(plants=True, ranges={"traces": Range(1), "share": Range(0, 1, closed=False)}, conflicts=(
    UNSOLVED, Conflict(("guidance.traces", "config.sampling.group"), _alone, "raise sampling.group, or lower traces")))
def experts(inner: Topology, *, group: int, traces: int = 1, share: float = 1.0, wrong: bool = False) -> Topology:
    """`inner`, whose first `traces` rollouts of each prompt begin with this share of a trace of its problem, each of another.

    If the problem has fewer traces, they come again; if it has none to learn from, the policy writes all rollouts. Traces that
    are known to be wrong are left out, unless `wrong` ones count. A share of 1 is all of a trace with its end token. A whole
    trace that does not fit is left to the policy.
    """
    def plan(forest):
        known, wanted = asked(forest), inner.plan(forest)
        return wanted if wanted.measure else wanted._replace(acts=tuple(one for act in wanted.acts for one in (
            begun(act, forest.problems[act.row]) if isinstance(act, Begin) and not isinstance(act.at, Problem) and
            not known[act.row] else [act])))

    def begun(act, problem):
        known = useful(problem, wrong)
        numbers = np.resize(known, min(traces, act.count)).tolist() if known else []
        rest = [dataclasses.replace(act, count=act.count - len(numbers))] if act.count > len(numbers) else []
        return [dataclasses.replace(act, count=1, parts=act.parts + from_trace(share, number)) for number in numbers] + rest

    return inner._replace(plan=plan, most=inner.most or group)


def from_trace(share: float, number: int = 0) -> tuple[BeginPart, ...]:
    """What a rollout with this share of a trace begins with."""
    return (BeginPart(Role.EXPERT, FromTrace(number, float(share))),) if share else ()

"""Some completions begin with the problem's solution, or a part of it, in whatever another topology plans."""
import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.data.forest import outcomes
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import Begin, BeginPart, ExpertShare
from jaxrl_llm.topologies.base import Plan, Topology, asked, topology
from jaxrl_llm.topologies.guides import Guide


def _alone(guide: Guide, group: int) -> str:
    """Why a guide leaves no completion of a group to the policy; "": it leaves some."""
    try:
        shares = guide.shares(group)
    except ValueError as error:
        return str(error)
    if not (shares > 0).all():
        return ""
    return f"experts begin all of the {group} completions of a group, and leave none to the policy"


def _unsolved(environment: Any, guide: Guide) -> str:
    """Why trajectories of an environment cannot begin as an expert would; "": they can."""
    for problem in environment.task.train if environment.oracle is None else ():
        if "solution" not in problem.extra:
            return (f"a guide begins trajectories as an expert would, and environment {environment.name!r} has neither an "
                    f"oracle nor a solution of problem {problem.id}")
    return ""


_CONFLICTS = (
    Conflict(("environment", "guide"), _unsolved,
             "give it an oracle, or its problems an extra['solution'], or take another method, for example grpo"),
    Conflict(("guide", "config.sampling.group"), _alone, "raise sampling.group, or change config.guidance"))


@topology(needs=("method.guidance",), provides=("expert", "hinted", "hint_mask"), conflicts=_CONFLICTS,
          takes={"guide": "guide"})
def guided(inner: Topology, *, group: int, guide: Guide) -> Topology:
    """`inner`, whose first rollouts of each prompt begin with shares of its solution, and a last group if the `guide` has any.

    The uids of a prompt's rollouts seed its random share, which depends on nothing else in the batch.
    """
    last = guide.second is not None
    before = 0  # rollouts of this batch before its last groups; 0: those have not begun

    def plan(forest):
        nonlocal before
        known = asked(forest)
        before = before if len(known) else 0
        if before and known.sum() > before:
            return Plan()
        wanted = inner.plan(forest)
        if wanted.complete and last and len(forest.ends):
            before = int(known.sum())
            return Plan(acts=tuple(Begin(row, group, parts_of(share)) for row, share in enumerate(shares_of(forest))))
        if wanted.measure:
            return wanted
        return wanted._replace(acts=tuple(one for act in wanted.acts for one in (
            aided(act) if isinstance(act, Begin) and not known[act.row] else [act])))

    def aided(act):
        shares = guide.shares(act.count)
        places = [0, *np.flatnonzero(np.diff(shares)) + 1, act.count]
        return [dataclasses.replace(act, count=int(end - start), parts=act.parts + parts_of(shares[start]))
                for start, end in zip(places, places[1:])]

    def shares_of(forest):
        uids, prompts_of = forest.uid[forest.ends], forest.prompt[forest.ends]
        normal = [np.random.default_rng(uids[prompts_of == row].tolist()).standard_normal()
                  for row in range(len(forest.problems))]
        return guide.last_shares(*outcomes(forest, int(asked(forest).max())), np.array(normal, np.float32))

    return inner._replace(plan=plan, most=(inner.most or group) + group * last)


def parts_of(share: float) -> tuple[BeginPart, ...]:
    """What a completion with this share of a solution begins with."""
    return (BeginPart(Role.EXPERT, ExpertShare(float(share))),) if share else ()

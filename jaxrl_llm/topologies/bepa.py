"""A trace that the policy wrote by a plan itself enters a group that failed (BEPA, arXiv 2601.05787)."""
import numpy as np

from jaxrl_llm.data.forest import Forest, graft, select, trim
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools.ranges import SHARE, Range
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, topology
from jaxrl_llm.topologies.guide_grpo import apart, first_uids, ids, plain, replacements, right
from jaxrl_llm.topologies.hints import hint_of, tells
from jaxrl_llm.topologies.wording import elsewhere, longer, template_of, worded

TEMPLATE = "{prompt}\n\nFollow this plan: {plan}"


def _planless(task: Task) -> str:
    """Why no problem of a task has a plan; "": some have."""
    some = (task.train[i] for i in range(min(len(task.train), 100)))
    return "" if any(hint_of(one, 1.0, "plan") for one in some) else (
        f"plans are extra['plan'] of problems or the first part of their traces, and the problems of task {task.name!r} have "
        "neither")


PLANS = Conflict(("task",), _planless, "give the data a column of them, or traces, or take another method, for example grpo")


@topology(ranges={"share": SHARE, "tries": Range(1)}, conflicts=(PLANS,))
def bepa(inner: Topology, *, template: str = TEMPLATE, share: float = 0.5, tries: int = 8) -> Topology:
    """`inner`, then `tries` rollouts under a plan for each problem that fails and that the policy has not solved in this run.

    The plan is `extra["plan"]` of the problem, or the first `share` of its first trace; `template` has `{plan}` and `{prompt}`,
    in words or in a .txt file. The first right one of these rollouts takes the place of the group's last rollout, under the
    prompt without the plan; the others are not trained on. A problem gets plans once in a run. What the policy writes by a
    plan, and its successes without, are kept by a replay rule such as `latest_success(place=last)`, and enter later groups
    that fail. `memory` has the ids of the problems that were solved or got plans.

    Metrics: `plan/prompts`, the share of the prompts that got plans; `plan/solved`, the share of those that were solved with
    them; `plan/answer`, the share of their plans that contain the answer.
    """
    template, memory = template_of(template, "plan", "prompt"), {"settled": list[int]()}

    def shown(problem: Problem) -> Problem | None:
        words = hint_of(problem, share, "plan")
        return worded(problem, template, plan=words) if words else None

    def plan(forest):
        own = plain(forest)
        wanted = inner.plan(own)
        if not (wanted.complete and len(own.ends)):
            return wanted
        acts, settled, firsts, rates = [], {*memory["settled"]}, first_uids(own), right(own)
        for row, problem in enumerate(own.problems):
            if np.isnan(rates[row]) or problem.id in settled or (rates[row] == 0 and (read := shown(problem)) is None):
                continue
            settled.add(problem.id)
            if rates[row] == 0:
                acts.append(Begin(apart(problem, int(firsts[row])), tries, reads=read))
        memory["settled"] = sorted(settled)
        return Plan(acts=tuple(acts))

    def choose(forest):
        chosen, made = np.zeros(len(forest.problems), bool), ids(forest) < 0
        chosen[~made] = inner.choose(plain(forest))
        return chosen

    def metrics(forest):
        made = [one for one in forest.problems if one.id < 0]
        found = inner.metrics(forest) | {"plan/prompts": len(made) / max(len(forest.problems) - len(made), 1)}
        if made:
            found["plan/solved"] = float(len(injected(forest)) / len(made))
            found["plan/answer"] = float(np.mean([tells(one, hint_of(one, share, "plan")) for one in made]))
        return found

    return inner._replace(plan=plan, choose=choose, finish=lambda forest: with_injected(inner.finish(forest)), metrics=metrics,
                          reads=longer(inner.reads, shown), memory=memory)


def with_injected(forest: Forest) -> Forest:
    """The forest in which the first right rollout by each plan takes the place of the last rollout of its group."""
    ends, solved = forest.ends, forest.solved[forest.ends]
    owner = forest.prompt[ends]
    moved, dropped, onto = np.zeros(len(ends), bool), np.zeros(len(ends), bool), dict[int, int]()
    for row, first in replacements(forest):
        if len(found := np.flatnonzero(solved & (owner == row))):
            moved[found[0]], onto[row] = True, first
            dropped[np.flatnonzero(owner == first)[-1]] = True
    if not onto:
        return forest
    part = select(trim(forest, moved), np.isin(np.arange(len(forest.problems)), [*onto]))
    return graft(trim(forest, ~(moved | dropped)), part, [onto[row] for row in sorted(onto)])


def injected(forest: Forest) -> list[int]:
    """Rows of the task's problems that have a rollout by a plan."""
    return sorted({int(row) for row in forest.prompt[forest.ends[elsewhere(forest)]] if forest.problems[row].id >= 0})

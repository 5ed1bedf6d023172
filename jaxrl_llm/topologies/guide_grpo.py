"""A group that is written under a hint replaces one that failed (Guide-GRPO, arXiv 2506.13923)."""
import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.forest import Forest, graft, select, trim
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools.ranges import SHARE
from jaxrl_llm.tools.registry import Conflict, one_of
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, topology
from jaxrl_llm.topologies.hints import hint_of, tells
from jaxrl_llm.topologies.wording import elsewhere, longer, template_of, under_prompts, worded

TEMPLATE = "{prompt}\n\nHint: {hint}"
FIRST = "first_uid"  # in the extra of a made problem: the uid of the first rollout of the group that failed


def _unhinted(task: Task, share: float, key: str, what: str) -> str:
    """Why no problem of a task has a hint; "": some have."""
    some = (task.train[i] for i in range(min(len(task.train), 100)))
    return "" if any(hint_of(one, share, key) for one in some) else (
        f"the {what}s are extra[{key!r}] of problems or the first part of their traces, and the problems of task {task.name!r} "
        "have neither")


HINTS = Conflict(("task",), lambda task: _unhinted(task, 1.0, "hint", "hint"),
                 "give the data a column of them, or traces, or take another method, for example grpo")


@topology(ranges={"share": SHARE, "threshold": SHARE}, conflicts=(HINTS,))
def guide_grpo(inner: Topology, *, group: int, template: str = TEMPLATE, share: float = 0.5, threshold: float = 0.0,
               join: str = "replace", mixin: bool = False) -> Topology:
    """`inner`, then for each prompt of whose rollouts at most `threshold` are right a new `group` that reads a hint too.

    The hint is `extra["hint"]` of the problem, or the first `share` of its first trace; `template` has `{hint}` and `{prompt}`,
    in words or in a .txt file. The group lies under the prompt without the hint, as one of its own: with `join="replace"` it is
    trained on in the place of the first one, and filters such as `dynamic_sampling` see it alone. `join="add"` makes both one
    group. With `mixin` wrong rollouts of a group with a right one give way to wrong ones of the group that it replaces, of
    which the first stays. A problem without a hint, or with one that does not fit, keeps its first group.

    Metrics: `hint/prompts`, the share of the prompts that got a second group; `hint/rescued`, the share of those with a right
    rollout in it; `hint/answer`, the share of their hints that contain the answer.
    """
    template, begun = template_of(template, "hint", "prompt"), set[int]()  # first uids of the groups with a second one
    one_of("join", join, ("replace", "add"))

    def shown(problem: Problem) -> Problem | None:
        hint = hint_of(problem, share)
        return worded(problem, template, hint=hint) if hint else None

    def plan(forest):
        if not forest.problems:
            begun.clear()
        own = plain(forest)
        wanted = inner.plan(own)
        if not (wanted.complete and len(own.ends)):
            return wanted
        acts, firsts = [], first_uids(own)
        for row in np.flatnonzero(right(own) <= threshold).tolist():
            problem, first = own.problems[row], int(firsts[row])
            if first not in begun and (read := shown(problem)) is not None:
                begun.add(first)
                acts.append(Begin(row if join == "add" else apart(problem, first), group, reads=read))
        return Plan(acts=tuple(acts))

    def choose(forest):
        chosen, made = np.zeros(len(forest.problems), bool), ids(forest) < 0
        chosen[~made] = inner.choose(plain(forest))
        for row, first in replacements(forest):
            chosen[row], chosen[first] = chosen[first], False
        return chosen

    def finish(forest):
        forest = inner.finish(forest)
        return mixed_in(forest) if mixin else forest

    def metrics(forest):
        return inner.metrics(forest) | told(forest, lambda problem: hint_of(problem, share))

    return inner._replace(plan=plan, choose=choose, finish=finish, metrics=metrics, reads=longer(inner.reads, shown),
                          most=(inner.most or group) + group if join == "add" else inner.most)


def ids(forest: Forest) -> np.ndarray:
    """i64[P], the ids of the problems."""
    return np.array([problem.id for problem in forest.problems], np.int64)


def apart(problem: Problem, first: int) -> Problem:
    """The problem as one that a topology made, for a group of its own beside that of the first uid."""
    return dataclasses.replace(problem, id=-1 - problem.id, extra={**problem.extra, FIRST: first})


def plain(forest: Forest) -> Forest:
    """The forest of problems of the task alone, without what was written under other words."""
    made = ids(forest) < 0
    return under_prompts(select(forest, ~made) if made.any() else forest)


def first_uids(forest: Forest) -> np.ndarray:
    """i64[P], the uid of the first rollout of each prompt; -1 without one."""
    owner, uids = forest.prompt[forest.ends], forest.uid[forest.ends]
    found = np.full(len(forest.problems), -1, np.int64)
    found[owner[::-1]] = uids[::-1]
    return found


def right(forest: Forest) -> np.ndarray:
    """f64[P], the share of the rollouts of each prompt that solve it; NaN without any."""
    owner, P = forest.prompt[forest.ends], len(forest.problems)
    count = np.bincount(owner, minlength=P)
    return np.where(count > 0, np.bincount(owner, forest.solved[forest.ends], P) / np.maximum(count, 1), np.nan)


def replacements(forest: Forest) -> list[tuple[int, int]]:
    """`(row, first)`: groups of their own that have rollouts, and the groups that they replace, by rows of the forest."""
    firsts, there = first_uids(forest), {*forest.prompt[forest.ends].tolist()}
    rows = {int(uid): row for row, (uid, problem) in enumerate(zip(firsts, forest.problems)) if problem.id >= 0}
    return [(row, rows[one.extra[FIRST]]) for row, one in enumerate(forest.problems)
            if one.id < 0 and row in there and one.extra.get(FIRST) in rows]


def mixed_in(forest: Forest) -> Forest:
    """The forest in which wrong rollouts of groups with a right one give way to as many wrong ones of the replaced group."""
    ends, wrong = forest.ends, ~forest.solved[forest.ends]
    owner = forest.prompt[ends]
    moved, dropped, onto = np.zeros(len(ends), bool), np.zeros(len(ends), bool), dict[int, int]()
    stays = np.isin(forest.uid[ends], first_uids(forest))  # by which the replaced group is known
    for row, first in replacements(forest):
        out, into = np.flatnonzero(wrong & (owner == row)), np.flatnonzero(wrong & (owner == first) & ~stays)
        count = min(len(out), len(into)) if not wrong[owner == row].all() else 0
        moved[into[:count]], dropped[out[:count]] = True, True
        onto[first] = row
    if not moved.any():
        return forest
    part = trim(forest, moved)
    has = np.isin(np.arange(len(part.problems)), owner[moved])
    return graft(trim(forest, ~(moved | dropped)), select(part, has), [onto[row] for row in np.flatnonzero(has).tolist()])


def told(forest: Forest, hint: Callable[[Problem], str]) -> dict[str, float]:
    """Metrics of the groups that were written under hints."""
    P = int((ids(forest) >= 0).sum())
    hinted = forest.ends[elsewhere(forest)]
    rows = np.unique(forest.prompt[hinted])
    metrics = {"hint/prompts": len(rows) / max(P, 1)}
    if len(rows):
        solved = {*forest.prompt[hinted[forest.solved[hinted]]].tolist()}
        problems = [forest.problems[row] for row in rows]
        metrics["hint/rescued"] = float(np.mean([row in solved for row in rows.tolist()]))
        metrics["hint/answer"] = float(np.mean([tells(problem, hint(problem)) for problem in problems]))
    return metrics

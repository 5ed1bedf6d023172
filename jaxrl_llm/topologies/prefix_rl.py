"""Problems that begin with a part of a right trace, in groups of their own (PrefixRL, arXiv 2601.18795)."""
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.found_traces import found_traces
from jaxrl_llm.tasks.traces import useful
from jaxrl_llm.tools.ranges import SHARE, Range
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import Begin, BeginPart, FromTrace
from jaxrl_llm.topologies.base import Topology, topology
from jaxrl_llm.topologies.hints import said, tells

CUT = "cut"  # in the extra of a made problem: the number of its trace, the share of it, and the number of its group
SIZES = Conflict(("sizes",), "the {part} begins groups at problems of its own, and {0[0]} gives the problems of the task "
                 "unequal numbers of rollouts", "leave one of the two out", bool)


@topology(takes={"task": "task", "environment": "environment"}, conflicts=(SIZES,),
          ranges={"low": SHARE, "high": Range(0, 1), "cuts": Range(1), "share": SHARE})
def prefix_rl(inner: Topology, *, task: Task | None = None, environment: Any = None, low: float = 0.4, high: float = 0.8,
              cuts: int = 3, share: float = 0.75, traces: str = "") -> Topology:
    """`inner`, of whose groups a `share` goes on behind a part of a right trace of the problem, as a problem of its own.

    Each problem has `cuts` parts: the first `low` to `high` of the tokens of one of its traces, drawn once for a run from its
    id. A part ends before the answer at the end of the trace. Its tokens are read and not trained on, and count among those of
    a completion; in an environment they begin the first turn. `traces`: a JSONL file of them, or the folder of an earlier run,
    whose right samples count, see `tasks.found_traces`; "": those of the data. Problems without one keep their prompt. `memory`
    has the number of groups so far, which seeds the choice. The numbers are the paper's; `share=1` trains on parts alone.

    Metrics: `prefix/share`, the share of the groups behind a part; `prefix/reward`, the mean reward of these groups;
    `prefix/unaided`, that of the others; `prefix/answer`, the share of the parts that contain the answer. Raises ValueError:
    low is above high, or no problem has a trace that can be cut.
    """
    if not low <= high < 1:
        raise ValueError(f"topology 'prefix_rl' has low={low} and high={high}; give 0 <= low <= high < 1")
    known, memory = found_traces(traces, task) if traces and task is not None else None, {"groups": 0}
    oracle = environment is not None and environment.oracle is not None
    some = range(0 if task is None or traces else min(len(task.train), 200))
    if some and not any(cut_of(task.train[i], which, low, high, oracle) for i in some for which in range(cuts)):
        raise ValueError(f"topology 'prefix_rl' cuts traces of problems, and those of task {task.name!r} have none; give the "
                         "data a column of traces or solutions, or set topology=\"traces='FILE'\"")

    def plan(forest):
        wanted = inner.plan(forest)
        return wanted if wanted.measure else wanted._replace(acts=tuple(
            moved(act, forest.problems[act.row]) if isinstance(act, Begin) and not isinstance(act.at, Problem) else act
            for act in wanted.acts))

    def moved(act: Begin, problem: Problem) -> Begin:
        number, problem = memory["groups"], with_traces(problem, known)
        memory["groups"] += 1
        rng = np.random.default_rng([problem.id, number])
        chosen, which = rng.random() < share, int(rng.integers(cuts))
        if not chosen or (cut := cut_of(problem, which, low, high, oracle)) is None:
            return act
        made = dataclasses.replace(problem, id=-1 - (problem.id * cuts + which), extra={**problem.extra, CUT: [*cut, number]})
        return dataclasses.replace(act, at=made, parts=(*act.parts, BeginPart(Role.HINT, cut)))

    def choose(forest):
        sampled = np.bincount(forest.prompt[forest.ends], minlength=len(forest.problems)) > 0
        return sampled & inner.choose(forest)

    return inner._replace(plan=plan, choose=choose, metrics=lambda forest: inner.metrics(forest) | told(forest), memory=memory,
                          others=True)


def with_traces(problem: Problem, known: Mapping[int, Sequence[Mapping[str, Any]]] | None) -> Problem:
    """The problem with the traces that are `known` of it, by its id; None: those of its data."""
    if known is None:
        return problem
    return dataclasses.replace(problem, extra={**problem.extra, "traces": [*known.get(problem.id, [])]})


def cut_of(problem: Problem, which: int, low: float, high: float, oracle: bool = False) -> FromTrace | None:
    """Which part of a right trace of a problem comes first, `which` of several that its id decides; None: it has no trace.

    The share is uniform in [low, high], or up to the answer at the end of the trace if that comes before. Of a trace that is
    the answer alone a part may be read. `oracle`: whether an environment has words for a problem without a trace.
    """
    if not (right := useful(problem)):
        return None
    number = right[int(np.random.default_rng([problem.id]).integers(len(right)))]
    words = said(problem, number)
    most = high if words == problem.answer else min(high, answer_at(words, problem.answer))
    share = float(np.random.default_rng([problem.id, which, 1]).uniform(min(low, most), most))
    return FromTrace(number, share) if share * len(words) >= 1 or oracle and not words else None


def answer_at(words: str, answer: str) -> float:
    """The share of a text before the last place of the answer, by characters; 1 if the answer is not in it."""
    place = words.rfind(answer) if answer else -1
    return place / len(words) if place >= 0 else 1.0


def told(forest: Forest) -> dict[str, float]:
    """Metrics of the groups that go on behind a part of a trace."""
    owner, cut = forest.prompt[forest.ends], np.array([CUT in problem.extra for problem in forest.problems], bool)
    rewards, groups = forest.rewards[forest.ends], np.unique(owner)
    metrics = {"prefix/share": float(cut[groups].mean())}
    for name, some in (("prefix/reward", cut[owner]), ("prefix/unaided", ~cut[owner])):
        if some.any():
            metrics[name] = float(rewards[some].mean())
    parts = [(problem, said(problem, problem.extra[CUT][0]), problem.extra[CUT][1])
             for problem in (forest.problems[row] for row in groups) if CUT in problem.extra]
    if parts:
        metrics["prefix/answer"] = float(np.mean([tells(problem, words[:int(share * len(words))])
                                                  for problem, words, share in parts]))
    return metrics

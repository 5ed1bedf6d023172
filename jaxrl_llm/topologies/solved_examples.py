"""Solved problems as examples in the context of unsolved ones: XRPO's in-context seeding (arXiv 2510.06672)."""
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.ranges import Range
from jaxrl_llm.topologies.acts import Act, Begin
from jaxrl_llm.topologies.base import Topology, topology
from jaxrl_llm.topologies.wording import (
    TASK_ALONE,
    Encode,
    elsewhere,
    fitting,
    longer,
    nearest,
    remember,
    template_of,
    worded,
    words_of,
)

EXAMPLE, TEMPLATE = "{prompt}{solution}\n\n", "{examples}{prompt}"


@topology(takes={"encode": "encode"}, conflicts=(TASK_ALONE,),
          ranges={"examples": Range(1), "corpus": Range(1), "reads": Range(1)})
def solved_examples(inner: Topology, *, group: int, encode: Encode, examples: int = 2, corpus: int = 1024,
                    example: str = EXAMPLE, template: str = TEMPLATE, reads: int = 512) -> Topology:
    """`inner`, whose further rollouts of prompts without any reward so far read `examples` solved problems first.

    The corpus in `memory` has a right completion of each of the last `corpus` problems that were solved before this batch. The
    nearest problems by BM25 of their words are shown in the `example` and the `template`, the nearest last, the problem itself
    never; an example that does not fit into `reads` tokens is cut at its end, and one without room is left out. Without an
    example rollouts read the prompt. They lie under the prompt, with the role ELSEWHERE, in the group of its other rollouts.
    Metrics: `examples/prompts`, share of the prompts that were shown some, `examples/solved`, share of these that were solved
    with them, `examples/corpus`, number of solved problems. The paper has two examples, and embeddings in the place of BM25;
    what the rollouts are trained under is our choice.
    """
    example, template = template_of(example, "prompt", "solution"), template_of(template, "examples", "prompt")
    memory = {"solved": list[dict[str, str]]()} if inner.memory is None else {**inner.memory, "solved": []}

    def shown_to(problem):
        solved = [one for one in memory["solved"] if one["prompt"] != words_of(problem)]
        near = nearest(words_of(problem), [one["prompt"] for one in solved], examples)
        return tuple(seeded(problem, [solved[n] for n in near], example, template, encode, reads))

    def plan(forest):
        wanted = inner.plan(forest)
        failed = unrewarded(forest, inner.most or group) if wanted.acts and not wanted.measure else ()
        return wanted._replace(acts=tuple(
            dataclasses.replace(act, reads=shown_to(forest.problems[act.row])) if _plain(act) and failed[act.row] else act
            for act in wanted.acts))

    def finish(forest):
        forest = inner.finish(forest)
        for end in forest.ends[forest.solved[forest.ends]].tolist():
            problem = forest.problems[forest.prompt[end]]
            remember(memory["solved"], {"prompt": words_of(problem), "solution": forest.texts[end]}, corpus)
        return forest

    def metrics(forest):
        ends, shown = forest.ends, elsewhere(forest)
        prompts = np.unique(forest.prompt[ends[shown]])
        found = {"examples/prompts": len(prompts) / max(len(forest.problems), 1),
                 "examples/corpus": float(len(memory["solved"]))}
        if len(prompts):
            found["examples/solved"] = len(np.unique(forest.prompt[ends[shown & forest.solved[ends]]])) / len(prompts)
        return {**inner.metrics(forest), **found}

    return inner._replace(plan=plan, finish=finish, metrics=metrics, memory=memory, reads=longer(inner.reads, reads))


def unrewarded(forest: Forest, most: int) -> np.ndarray:
    """bool[P], prompts all of whose rollouts so far have reward 0; not those without any."""
    rewards, valid = outcomes(forest, most)
    return valid.any(1) & ~(valid & (rewards != 0)).any(1)


def seeded(problem: Problem, near: Sequence[dict[str, str]], example: str, template: str, encode: Encode, most: int
           ) -> list[int]:
    """Token ids of a problem behind its nearest examples, at most `most`, with as many examples as fit; none: no ids.

    Where the next example does not fit, its solution is cut to as many characters as do.
    """
    def ids_of(examples):
        text = "".join(example.format(**one) for one in reversed(examples))
        return fitting(encode, worded(problem, template, examples=text), most)

    shown, ids = list[dict[str, str]](), list[int]()
    for one in near:
        if not (longer := ids_of([*shown, one])):
            one, longer = _cut(one, lambda part: ids_of([*shown, part]))
        if longer:
            shown, ids = [*shown, one], longer
    return ids


def _cut(one: dict[str, str], ids_of: Callable[[dict[str, str]], list[int]]) -> tuple[dict[str, str], list[int]]:
    """The example with the longest beginning of its solution that fits, and the ids with it; no ids if none fits."""
    low, high, best = 1, len(one["solution"]) - 1, list[int]()
    found = one
    while low <= high:
        middle = (low + high) // 2
        part = {**one, "solution": one["solution"][:middle]}
        if ids := ids_of(part):
            found, best, low = part, ids, middle + 1
        else:
            high = middle - 1
    return found, best


def _plain(act: Act) -> bool:
    """Whether an act begins trajectories at a prompt of the task, under the prompt."""
    return isinstance(act, Begin) and not isinstance(act.at, Problem) and act.reads == ()

"""Unsolved problems are decomposed, then answered again behind wrong answers: Cog-Rethinker's rollouts (arXiv 2510.15979)."""
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.ranges import NOT_NEGATIVE, Range
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, topology
from jaxrl_llm.topologies.wording import (
    TASK_ALONE,
    Encode,
    elsewhere,
    fitting,
    longer,
    nearest,
    remember,
    template_of,
    under_prompts,
    worded,
    words_of,
)

DECOMPOSE = "Split the problem into smaller ones, solve each, and answer.\n\n{examples}{prompt}"
REFLECT = "{examples}{wrong}The answers above are wrong. Find the mistakes, and answer again.\n\n{prompt}"
DECOMPOSED = [{"prompt": "Ann buys 4 pens for 3 each and pays with 20. How much is left?",
               "solution": "First: 4 pens cost 4 * 3 = 12. Then: 20 - 12 = 8 is left. The answer is 8."}]
REFLECTED = [{"prompt": "Ben has 5 bags of 6 nuts and eats 4 nuts. How many are left?",
              "wrong": "5 + 6 - 4 = 7. The answer is 7.",
              "solution": "The bags are to be multiplied, not added: 5 * 6 = 30, and 30 - 4 = 26. The answer is 26."}]


class Need(NamedTuple):
    """Who is asked again: `decompose`, `reflect` bool[P], and `keep` bool[P], prompts for reinforcement."""

    decompose: np.ndarray
    reflect: np.ndarray
    keep: np.ndarray


def need_of(direct: np.ndarray, decomposed: np.ndarray) -> Need:
    """Who is asked again, from the shares of right rollouts f[P] of the first two stages; NaN where there are none."""
    never = direct == 0
    return Need(never, never & ~(decomposed > 0), (direct > 0) & (direct < 1))


@topology(takes={"encode": "encode"}, conflicts=(TASK_ALONE,),
          ranges={"retries": NOT_NEGATIVE, "examples": NOT_NEGATIVE, "shown": Range(1), "corpus": Range(1), "reads": Range(1)})
def decompose_reflect(inner: Topology, *, group: int, encode: Encode, retries: int = 0, examples: int = 2, shown: int = 2,
                      corpus: int = 256, decompose: str = DECOMPOSE, reflect: str = REFLECT, reads: int = 1024) -> Topology:
    """`inner`, then `retries` rollouts that decompose each problem that it never solved, then as many that reflect.

    The second stage reads `decompose`, with `examples` decompositions that were right; the third, for problems that are still
    unsolved, `reflect`, with corrections that were right and up to `shown` wrong answers of this batch, the last ones. Examples
    are the nearest of up to `corpus` in `memory` by BM25 of their problems, the nearest last; each stage has its memory, which
    begins with one by hand. They lie under the prompt, with the role ELSEWHERE. Examples, then wrong answers, are left out as
    far as `reads` tokens have no room for them, and a problem that does not fit without any is not asked again. `retries=0`:
    half a group. Metrics: `decompose/prompts`, `reflect/prompts`, shares of the prompts that reached the stage;
    `decompose/solved`, `reflect/solved`, shares of these that were solved in it. Numbers and words are ours: the paper's are
    not published.
    """
    decompose, reflect = template_of(decompose, "examples", "prompt"), template_of(reflect, "examples", "wrong", "prompt")
    times = retries or max(group // 2, 1)
    memory = {**(inner.memory or {}), "decomposed": [*DECOMPOSED], "reflected": [*REFLECTED]}

    def asked_in(forest, problem, row, stage):
        words, wrong = words_of(problem), wrong_answers(forest, row, times, shown) if stage else []
        kept = [one for one in memory[("decomposed", "reflected")[stage]] if one["prompt"] != words]
        near = [kept[n] for n in nearest(words, [one["prompt"] for one in kept], examples)]
        return shortened(problem, (decompose, reflect)[stage], near, wrong, encode, reads)

    def plan(forest):
        own = under_prompts(forest)
        wanted = inner.plan(own)
        if not (wanted.complete and len(own.ends)):
            return wanted
        need, number = need_of(*(rates(forest, stage, times) for stage in (-1, 0))), retried(forest)
        for stage, who in enumerate((need.decompose & (number == 0), need.reflect & (number == times))):
            asked = {row: asked_in(forest, forest.problems[row], row, stage) for row in np.flatnonzero(who).tolist()}
            if any(asked.values()):
                return Plan(acts=tuple(Begin(row, times, reads=ids) for row, ids in asked.items() if ids))
        return Plan()

    def finish(forest):
        forest = inner.finish(forest)
        for stage, name in enumerate(("decomposed", "reflected")):
            ends = at_stage(forest, stage, times)
            for end in ends[forest.solved[ends]].tolist():
                row = int(forest.prompt[end])
                known = {"prompt": words_of(forest.problems[row]), "solution": forest.texts[end]}
                wrong = {"wrong": wrong_answers(forest, row, times, 1)[0]} if stage else {}
                remember(memory[name], known | wrong, corpus)
        return forest

    def metrics(forest):
        found = dict(inner.metrics(forest))
        for stage, name in enumerate(("decompose", "reflect")):
            share = rates(forest, stage, times)
            reached = ~np.isnan(share)
            found[f"{name}/prompts"] = float(reached.mean())
            if reached.any():
                found[f"{name}/solved"] = float((share[reached] > 0).mean())
        return found

    return inner._replace(plan=plan, finish=finish, metrics=metrics, memory=memory, reads=longer(inner.reads, reads),
                          most=(inner.most or group) + 2 * times)


def at_stage(forest: Forest, stage: int, times: int) -> np.ndarray:
    """i32[n], ends of the rollouts of a stage: -1 under the prompt, 0 the first `times` of a prompt elsewhere, 1 the others."""
    ends, apart = forest.ends, elsewhere(forest)
    if stage < 0:
        return ends[~apart]
    ends = ends[apart]
    owner = forest.prompt[ends]
    return ends[(np.arange(len(ends)) - np.searchsorted(owner, owner)) // times == stage]


def rates(forest: Forest, stage: int, times: int) -> np.ndarray:
    """f64[P], the share of right rollouts of each prompt in a stage; NaN where it has none."""
    ends, P = at_stage(forest, stage, times), len(forest.problems)
    count = np.bincount(forest.prompt[ends], minlength=P)
    right = np.bincount(forest.prompt[ends], forest.solved[ends], minlength=P)
    return np.where(count > 0, right / np.maximum(count, 1), np.nan)


def retried(forest: Forest) -> np.ndarray:
    """i64[P], rollouts of each prompt that were written elsewhere."""
    return np.bincount(forest.prompt[forest.ends[elsewhere(forest)]], minlength=len(forest.problems))


def wrong_answers(forest: Forest, row: int, times: int, most: int) -> list[str]:
    """The last wrong answers to a prompt in the first two stages, at most `most`, the last first."""
    ends = np.concatenate([at_stage(forest, stage, times) for stage in (-1, 0)])
    ends = ends[forest.prompt[ends] == row]
    return [forest.texts[end] for end in ends[~forest.solved[ends]][::-1][:most]]


def shortened(problem: Problem, template: str, near: list[dict[str, str]], wrong: list[str], encode: Encode, most: int
              ) -> list[int]:
    """Token ids of a problem in a template, with as many of its nearest examples and wrong answers as `most` tokens hold.

    The least near examples are left out first, then the oldest wrong answers; none if nothing fits but the prompt alone.
    """
    alone = encode(problem)
    for count in range(len(near) + len(wrong), -1, -1):
        answers = wrong[:count]
        shown = "".join(_example(one) for one in reversed(near[:max(count - len(wrong), 0)]))
        said = "".join(f"{words_of(problem)}\n{answer}\n\n" for answer in reversed(answers))
        if (ids := fitting(encode, worded(problem, template, examples=shown, wrong=said), most)) and ids != alone:
            return ids
    return []


def _example(one: dict[str, str]) -> str:
    """The words of an example: a problem, a wrong answer if it has one, and the right one."""
    wrong = f"{one['wrong']}\nThis is wrong.\n" if "wrong" in one else ""
    return f"{one['prompt']}\n{wrong}{one['solution']}\n\n"

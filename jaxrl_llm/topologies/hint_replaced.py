"""Completions that the policy writes under a hint replace some rollouts of unsolved prompts (KEPO, arXiv 2602.00400)."""
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.control.kepo import replaced, unsolved
from jaxrl_llm.data.forest import Forest, outcomes, trim
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import traces_of, useful
from jaxrl_llm.tools.ranges import Range
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, topology
from jaxrl_llm.topologies.hints import tells
from jaxrl_llm.topologies.wording import TASK_ALONE, WHOLE, elsewhere, longer, template_of, under_prompts, worded

TEMPLATE = "A hint, which the answer does not mention: {hint}\n{prompt}"


@topology(conflicts=(TASK_ALONE, WHOLE), ranges={"draws": Range(1), "attempts": Range(1)})
def hint_replaced(inner: Topology, *, group: int, draws: int = 2, attempts: int = 5, adaptive: bool = True,
                  template: str = TEMPLATE) -> Topology:
    """`inner`, then `draws` completions under a hint at each prompt without reward, again up to `attempts` times.

    Once all `draws` of an attempt are right, they take the places of `draws` rollouts, which are drawn with replacement: a
    place that is drawn twice has the later one. Rewards and advantages are those of the new group, and the completions lie
    under the prompt without the hint, with the role ELSEWHERE. A prompt without such an attempt keeps its rollouts.
    `adaptive=False` gives hints at all prompts. The hint is `extra["hint"]` of the problem, or else its first trace that may be
    right; a problem with neither keeps its rollouts.
    `template` has `{hint}` and `{prompt}`, in words or in a .txt file. Metrics: `hint/prompts`, share of the prompts that got
    hints; `hint/solved`, share of these that were solved with them; `hint/answer`, share of the hints that contain the answer.
    """
    template, told = template_of(template, "hint", "prompt"), dict[str, float]()

    def shown(problem):
        hint = hint_of(problem)
        return None if hint is None else worded(problem, template, hint=hint)

    def wanted(own):
        rewards, valid = outcomes(own, inner.most or group)
        return np.asarray(unsolved(rewards, valid)) if adaptive else valid.any(1)

    def plan(forest):
        own = under_prompts(forest)
        next_one = inner.plan(own)
        if not (next_one.complete and len(own.ends)):
            return next_one
        tried, solved = attempted(forest, draws)
        rows = np.flatnonzero(wanted(own) & ~solved & (tried < attempts)).tolist()
        read = {row: shown(forest.problems[row]) for row in rows}
        return Plan(acts=tuple(Begin(row, draws, reads=one) for row, one in read.items() if one is not None))

    def finish(forest):
        tried, solved = attempted(forest, draws)
        hinted = np.flatnonzero(tried)
        told.clear()
        told["hint/prompts"] = float((tried > 0).mean())
        if len(hinted):
            problems = [forest.problems[row] for row in hinted]
            told["hint/solved"] = float(solved[hinted].mean())
            told["hint/answer"] = float(np.mean([tells(problem, hint_of(problem) or "") for problem in problems]))
        return inner.finish(with_replaced(forest, solved, draws))

    return inner._replace(plan=plan, finish=finish, reads=longer(inner.reads, shown),
                          metrics=lambda forest: {**inner.metrics(forest), **told})


def hint_of(problem: Problem) -> str | None:
    """What a prompt with a hint shows: `extra["hint"]`, or the words of the first trace that may be right; None: nothing."""
    if "hint" in problem.extra:
        return str(problem.extra["hint"]) or None
    if not (right := useful(problem)):
        return None
    words = traces_of(problem)[right[0]].words
    return words if isinstance(words, str) else "\n".join(str(message["content"]) for message in words)


def attempted(forest: Forest, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """`(tried i64[P], solved bool[P])`: attempts of `draws` completions under hints, and whether all of the last are right.

    What is lost counts as tried: hints for which there is no room.
    """
    hinted = forest.ends[elsewhere(forest)]
    came = np.bincount(forest.prompt[hinted], minlength=len(forest.problems))
    solved = np.zeros(len(came), bool)
    for row in np.flatnonzero(came >= draws):
        solved[row] = forest.solved[hinted[forest.prompt[hinted] == row][-draws:]].all()
    return (came + forest.lost) // draws, solved


def with_replaced(forest: Forest, solved: np.ndarray, draws: int) -> Forest:
    """The forest in which the last attempt of prompts that it `solved` bool[P] replaces rollouts, without other attempts.

    The uid of a prompt's first rollout is the key of the draw, whatever else is in the batch.
    """
    ends, keep = forest.ends, ~elsewhere(forest)
    hinted = np.flatnonzero(~keep)
    for row in np.flatnonzero(solved):
        own = np.flatnonzero(keep & (forest.prompt[ends] == row))
        last = hinted[forest.prompt[ends[hinted]] == row][-draws:]
        key = jax.random.key(int(forest.uid[ends[own[0]]]) & 0xFFFFFFFF)
        places = np.flatnonzero(np.asarray(replaced(key, jnp.ones(1, bool), len(own), draws=draws))[0])
        keep[own[places]] = False
        keep[last[draws - len(places):]] = True
    return trim(forest, keep)

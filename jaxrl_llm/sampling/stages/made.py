"""Problems that a topology made: they join the forest before trajectories begin at them, or are read in place of prompts."""
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.engines.prompts import fit
from jaxrl_llm.sampling.stages.base import Origin, Unfinished
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import Begin, Plan

NOTE = "made"  # rows of made problems whose prompts do not fit, in the notes of a batch


def at_rows(plan: Plan, known: Sequence[Problem]) -> tuple[tuple[Problem, ...], Plan]:
    """The problems of a plan's acts that are not `known` yet, each once, and the plan with rows in their place."""
    problems = list(known)

    def row(problem):
        found = next((n for n, one in enumerate(problems) if one.id == problem.id and one == problem), None)
        if found is None:
            problems.append(problem)
        return len(problems) - 1 if found is None else found

    acts = tuple(dataclasses.replace(act, at=row(act.at)) if isinstance(act, Begin) and isinstance(act.at, Problem) else act
                 for act in plan.acts)
    return tuple(problems[len(known):]), plan._replace(acts=acts)


def planted(batch: Unfinished, source: Origin) -> Unfinished:
    """The batch that draws `plan.problems`, as a part of the last draw; the note `made` has the rows of those that do not fit.

    The forest has the first tokens of a prompt that does not fit. Raises ValueError for such a prompt, unless
    `prompts.overlong` leaves it out.
    """
    problems, stream, forest = batch.plan.problems, source.stream, batch.forest
    encoded = parallel.first(stream.partner.encode(problems, stream.tokenizer, batch.timer))
    fitted = [None if ids is None else fit(ids, problem, stream.prompt_tokens, source.overlong, stream.tokenizer)
              for problem, ids in zip(problems, encoded, strict=True)]
    shown = [ids or (one or [0])[:stream.prompt_tokens] for ids, one in zip(fitted, encoded)]
    new = source.planted(list(zip(problems, shown)), draw=int(forest.draw.max(initial=0)))
    unfit = {len(forest.problems) + n for n, ids in enumerate(fitted) if ids is None} | {*batch.notes.get(NOTE, ())}
    return batch._replace(drawn=new).noted(NOTE, frozenset(unfit))


def with_facts_of(new: Forest, forest: Forest) -> Forest:
    """The new prompts with the facts that those of a forest have; what no stage knows of them is NaN, or 0 of whole numbers."""
    def unknown(values):
        fill = np.nan if np.issubdtype(values.dtype, np.floating) else 0
        return np.full((len(new.problems), *values.shape[1:]), fill, values.dtype)

    return new.with_facts({name: new.facts[name] if name in new.facts else unknown(values)
                           for name, values in forest.facts.items()}) if forest.problems else new


def without_lost(batch: Unfinished) -> Unfinished:
    """The batch whose plan begins nothing at prompts that do not fit; what it would have begun counts as lost."""
    unfit = batch.notes.get(NOTE, ())
    return _without(batch, [isinstance(act, Begin) and act.row in unfit for act in batch.plan.acts]) if unfit else batch


def readable(batch: Unfinished, source: Origin) -> Unfinished:
    """The batch whose acts read token ids in place of problems; acts at problems whose prompts do not fit count as lost.

    Raises ValueError for such a prompt, unless `prompts.overlong` leaves it out, and for an environment that opens both alike.
    """
    stream, overlong = source.stream, source.overlong
    problems = list[Problem]()
    place = {}  # of what each act reads, by its number
    for number, act in enumerate(batch.plan.acts):
        if isinstance(act, Begin) and isinstance(act.reads, Problem):
            place[number] = next((n for n, one in enumerate(problems) if one is act.reads), len(problems))
            problems += [act.reads] if place[number] == len(problems) else []
    if not problems:
        return batch
    encoded = parallel.first(stream.partner.encode(problems, stream.tokenizer, batch.timer))
    fitted = [None if ids is None else fit(ids, problem, stream.longest_read, overlong, stream.tokenizer)
              for problem, ids in zip(problems, encoded, strict=True)]
    _check_words(batch, problems, fitted, place, source)
    acts = tuple(dataclasses.replace(act, reads=tuple(fitted[place[number]] or ()))
                 if isinstance(act, Begin) and number in place else act for number, act in enumerate(batch.plan.acts))
    return _without(batch._replace(plan=batch.plan._replace(acts=acts)),
                    [number in place and fitted[place[number]] is None for number in range(len(acts))])


def _check_words(batch: Unfinished, problems: Sequence[Problem], ids: Sequence[list[int] | None], place: Mapping[int, int],
                 source: Origin) -> None:
    """Raises ValueError if an environment shows nothing of the words that the policy is to read in place of a prompt."""
    if (runner := source.stream.partner.runner) is None:
        return
    for number, at in place.items():
        act = batch.plan.acts[number]
        if isinstance(act, Begin) and ids[at] == batch.forest.prompt_ids(act.row).tolist():
            raise ValueError(f"the topology lets the policy read {str(problems[at].prompt)[:200]!r} in place of a prompt, and "
                             f"environment {runner.environment.name!r} opens both alike; let `reset` open with the prompt of "
                             "the problem, or take a method without hints and plans, for example grpo")


def _without(batch: Unfinished, unfit: Sequence[bool]) -> Unfinished:
    """The batch whose plan lacks the acts that are unfit; what they would have begun counts as lost."""
    lost = batch.forest.lost.copy()
    for act, out in zip(batch.plan.acts, unfit, strict=True):
        if out and isinstance(act, Begin):
            lost[act.row] += act.count
    kept = tuple(act for act, out in zip(batch.plan.acts, unfit, strict=True) if not out)
    return batch._replace(plan=batch.plan._replace(acts=kept), forest=batch.forest.with_columns(lost=lost))

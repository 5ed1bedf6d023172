"""The moments of a batch, at each of which all stages of a source act in their order."""
import functools
from typing import Any

from jaxrl_llm.control import Controller
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.stages import made
from jaxrl_llm.sampling.stages.base import Origin, Unfinished
from jaxrl_llm.topologies import Plan


def begun(batch: Unfinished, source: Origin) -> Unfinished:
    """The batch before anything is planned."""
    return functools.reduce(lambda batch, stage: stage.begin(batch, source), source.stages, batch)


def grown(batch: Unfinished, source: Origin) -> Unfinished:
    """The batch after its plan is carried out: the problems that it draws join the forest, and before them those of acts."""
    new, plan = made.at_rows(batch.plan, batch.forest.problems)
    if new:
        batch = _carried_out(batch._replace(plan=Plan(problems=new)), source)
    return _carried_out(made.readable(made.without_lost(batch._replace(plan=plan)), source), source)


def _carried_out(batch: Unfinished, source: Origin) -> Unfinished:
    """The same for a plan whose acts are all at rows of the forest."""
    batch = batch._replace(first=len(batch.forest.uid), drawn=None)
    batch = functools.reduce(lambda batch, stage: stage.grow(batch, source), source.stages, batch)
    if batch.drawn is None:
        return batch
    drawn = made.with_facts_of(batch.drawn, batch.forest) if batch.plan.problems else batch.drawn
    joined = forests.join([batch.forest, drawn]) if batch.forest.problems else drawn
    return batch._replace(forest=joined, drawn=None)


def ended(batch: Unfinished, source: Origin) -> Unfinished:
    """The batch whose plan is complete, with the prompts to train on."""
    return functools.reduce(lambda batch, stage: stage.end(batch, source), source.stages, batch)


def viewed(batch: Unfinished, forest: Forest, source: Origin) -> Rollouts:
    """The rollouts of a batch's forest, or of one that it replays."""
    batch, first = batch._replace(forest=forest), source.view(forest, batch.snapshot.version)
    return functools.reduce(lambda rollouts, stage: stage.view(rollouts, batch, source), source.stages, first)


def reads(source: Origin) -> dict[str, tuple[Knob, ...]]:
    """The knobs that sampling and each stage read, by the words for the part."""
    return {"sampling": source.stream.reads, **{f"the stage {one.name!r}": one.reads for one in source.stages if one.reads}}


def controllers(source: Origin) -> dict[str, Controller]:
    """The controllers that learn for stages, by name."""
    return {name: one for stage in source.stages for name, one in stage.controllers.items()}


def memory(source: Origin) -> dict[str, Any]:
    """What stages keep between batches, by name: that of the source, or what it is before the first batch."""
    kept = [stage.memory for stage in source.stages if stage.memory is not None]
    return {one.name: source.memory[one.name] if one.name in source.memory else one.empty(source) for one in kept}


def check(source: Origin) -> None:
    """Raises ValueError if a stage needs a column or a fact that neither forests of the source nor earlier stages have."""
    if not any(stage.needs for stage in source.stages):
        return
    there = {*source.planted([], draw=0).columns, *source.stream.facts}
    for stage in source.stages:
        if missing := sorted({*stage.needs} - there):
            raise ValueError(f"the stage {stage.name!r} needs {', '.join(missing)}, which neither forests of this run nor "
                             f"earlier stages have; they have {', '.join(sorted(there))}")
        there |= {*stage.provides}

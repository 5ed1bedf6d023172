"""Draws problems from the task: those that controllers propose, others by weight, or the next ones of the loader."""
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control import Fact
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.sampling.fitting import fitting_problems
from jaxrl_llm.sampling.stages import made
from jaxrl_llm.sampling.stages.base import Origin, Rows, Stage, Unfinished
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.loader import drawn, evenly

_FILLS = 100  # problems to read, for each that is wanted, in search of prompts that are not too long
_PROMPT_STREAM = 2**31 - 3  # folded into the run's key, for batches that are drawn by weights
READS = (
    Knob("prompt_weights", ("N",), 0, doc="f32[N], weights of the training problems in the draw of batches, see "
         "`tasks.loader.drawn`. With several tasks each is multiplied by its task's weight over the number of its problems"),
    Knob("prompt_ids", ("B",), most="last", doc="i32[B], problems of the next batch; ids below 0, and missing entries of a "
         "batch, are drawn by the weights"),
    Knob("group_sizes", ("B",), 0, doc="i32[B], rollouts of each of these, from 1 to `sampling.max_group`; others get G"),
)
FACTS = (Fact("group_size", "i32[P], rollouts of each prompt, where a controller sets `group_sizes`",
              ("knobs.group_sizes",)),)


def draw() -> Stage:
    """Draws `plan.draw` problems whose prompts fit, or takes those of the plan.

    With `group_sizes` drawn ones have the fact `group_size` i32[P].
    """
    return Stage("draw", grow=_grow, reads=READS, provides=("group_size",))


def _grow(batch: Unfinished, source: Origin) -> Unfinished:
    if batch.plan.problems:
        return made.planted(batch, source)
    if not batch.plan.draw:
        return batch
    rows, knobs = list[Any](), batch.knobs
    count, length = batch.plan.draw, source.stream.prompt_tokens
    if batch.forest.problems:  # controllers propose one batch per step
        knobs = {name: value for name, value in knobs.items() if name != "prompt_ids"}
    more, seen = problems(source, batch.snapshot.key, knobs), 0
    while (missing := count - len(rows)) and seen < _FILLS * count:  # reads no more than are missing: none is left over
        rows += fitting_problems(more(seen, missing), source.stream.tokenizer, length, source.overlong, source.readers,
                                 functools.partial(source.stream.partner.encode, timer=batch.timer))
        seen += missing
    if not rows:
        raise ValueError(f"no prompt of {_FILLS} batches fits in prompts.max_tokens={length}; raise it")
    return batch._replace(drawn=_planted(rows, batch.forest, source, knobs))


def _planted(rows: Rows, forest: Forest, source: Origin, knobs: Mapping[str, Any]) -> Forest:
    """The forest of these problems alone, with their sizes if controllers set them."""
    new = source.planted(rows, draw=int(forest.draw.max(initial=-1)) + 1)
    if "group_sizes" not in knobs:
        return new
    return new.with_facts({"group_size": _sizes(new, source.stream.group, knobs)})


def _sizes(new: Forest, group: int, knobs: Mapping[str, Any]) -> np.ndarray:
    """i32[P], the rollouts to sample for each problem: as proposed, or one group for problems without a proposal."""
    if "prompt_ids" not in knobs:
        return np.full(len(new.problems), group, np.int32)
    wanted = dict(zip(np.asarray(knobs["prompt_ids"]).tolist(), np.asarray(knobs["group_sizes"]).tolist()))
    return np.array([wanted.get(problem.id, group) for problem in new.problems], np.int32)


def problems(source: Origin, key: jax.Array, knobs: Mapping[str, Any]) -> Callable[[int, int], list[Problem]]:
    """`(first, count) -> problems`, this process's share of a part of the order in which a draw reads problems.

    The order has proposed problems first, then others by weight; or, if nothing is proposed, the next ones of the loader.
    """
    proposed = np.asarray(knobs.get("prompt_ids", ()), np.int64)
    proposed = proposed[proposed >= 0]
    if "prompt_weights" not in knobs and not len(proposed):
        return lambda first, count: source.data.take(count)
    weights = np.asarray(knobs["prompt_weights"]) if "prompt_weights" in knobs else np.ones(len(source.task.train))
    key = jax.random.fold_in(jax.random.fold_in(key, _PROMPT_STREAM), source.data.number)
    seed, base = parallel.fetch(jax.random.key_data(key)), evenly(source.task.train)

    def part(first, count):
        others = drawn(seed, max(first + count - len(proposed), 0), weights, base)  # begins like the draws before it
        return source.data.chosen(np.concatenate([proposed, others])[first:first + count])

    return part

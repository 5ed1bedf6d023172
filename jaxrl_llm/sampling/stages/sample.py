"""Samples groups of trajectories for the prompts of a plan."""
from typing import Any

import numpy as np

from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished

READS = (
    Knob("token_limits", ("N",), 1, doc="i32[N], maximum tokens of the completions of each training problem; the lower of this "
         "and `max_tokens` holds"),
)


def sample() -> Stage:
    """A group for each of `plan.rows`, with the next uids; the rollouts have the temperature at which they were sampled."""
    return Stage("sample", grow=_grow, end=_end, view=_view, reads=READS)


def _grow(batch: Unfinished, source: Origin) -> Unfinished:
    plan, forest, stream = batch.plan, batch.forest, source.stream
    if not len(plan.rows) or plan.measure or plan.draw:
        return batch
    first, own = source.next_uid, dict[str, Any]()
    source.next_uid = first + len(plan.rows) * stream.group
    if plan.shares is not None:
        uids = range(first, source.next_uid, stream.group)
        own["forced"] = [stream.partner.beginnings(forest.problems[row], range(uid, uid + len(some)), some)
                         for row, uid, some in zip(plan.rows, uids, plan.shares)]
    if "token_limits" in batch.knobs:
        ids = [forest.problems[row].id for row in plan.rows]
        own["limits"] = np.asarray(batch.knobs["token_limits"], np.int32)[ids]
    return batch._replace(forest=stream.groups(forest, plan.rows, first, batch.timer, **own))


def _end(batch: Unfinished, source: Origin) -> Unfinished:
    """The metric `sampling/balance` of several replicas: the fewest tokens that one has drawn per those of the busiest."""
    shares = source.stream.shares()
    return batch.measured({"sampling/balance": min(shares) / max(shares)} if len(shares) > 1 and max(shares) else {})


def _view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
    if "temperature" not in batch.knobs:
        return rollouts
    temperature = batch.knobs["temperature"] or 1  # greedy samples are scored at temperature 1, as the sampler reports them
    return rollouts.replace(temperature=np.full(len(rollouts.valid), temperature, np.float32))

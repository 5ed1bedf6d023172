"""Samples the trajectories that a plan begins."""
import numpy as np

from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished
from jaxrl_llm.topologies.acts import limited, numbered

READS = (
    Knob("token_limits", ("N",), 1, doc="i32[N], maximum tokens of the completions of each training problem; the lower of this "
         "and `max_tokens` holds"),
)


def sample() -> Stage:
    """The trajectories of `plan.acts`, with the next uids; the rollouts have the temperature at which they were sampled."""
    return Stage("sample", grow=_grow, end=_end, view=_view, reads=READS)


def _grow(batch: Unfinished, source: Origin) -> Unfinished:
    plan, forest = batch.plan, batch.forest
    if not plan.acts or plan.measure or plan.draw:
        return batch
    acts, first = plan.acts, source.next_uid
    _, source.next_uid = numbered(acts, first, source.stream.group)
    if "token_limits" in batch.knobs:
        ids = np.array([problem.id for problem in forest.problems], np.int64)
        limits = np.asarray(batch.knobs["token_limits"], np.int32)
        acts = limited(acts, np.where(ids < 0, source.stream.max_tokens, limits[np.maximum(ids, 0)]))
    return batch._replace(forest=source.stream.run(forest, acts, first, batch.timer, not batch.measuring))


def _end(batch: Unfinished, source: Origin) -> Unfinished:
    """The metric `sampling/balance` of several replicas: the fewest tokens that one has drawn per those of the busiest."""
    shares = source.stream.shares()
    return batch.measured({"sampling/balance": min(shares) / max(shares)} if len(shares) > 1 and max(shares) else {})


def _view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
    if rollouts.role is None and (batch.topology.reads or batch.topology.others):  # one shape for all batches of a run
        rollouts = rollouts.replace(role=np.where(rollouts.mask, Role.POLICY, Role.PADDING).astype(np.int8))
    if "temperature" not in batch.knobs:
        return rollouts
    temperature = batch.knobs["temperature"] or 1  # greedy samples are scored at temperature 1, as the sampler reports them
    return rollouts.replace(temperature=np.full(len(rollouts.valid), temperature, np.float32))

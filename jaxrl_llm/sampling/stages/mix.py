"""Mixes stored rollouts into a batch: it samples fewer prompts, and groups of the buffer take their places."""
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.replay import Replay
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.stages.base import Origin, Stage, StageMemory, Unfinished, placed, with_extras
from jaxrl_llm.topologies import Topology

_STREAM = 2**31 - 4  # folded into the run's key, for what is mixed into batches


def mix(replay: Replay, fewer: Callable[[int], Topology]) -> Stage:
    """Groups of `memory["buffer"]` by the rule of a replay; `fewer(prompts)` is the topology of the prompts that remain.

    The rollouts have `replayed` bool[P, G], and under rules with weights `replay_weights` f32[P, G, T].
    """
    def begin(batch: Unfinished, source: Origin) -> Unfinished:
        buffer, rng = source.memory["buffer"], generator(batch.snapshot)
        stored, left = buffers.take(replay, buffer, batch.snapshot.version, source.prompts, rng)
        return batch._replace(topology=fewer(source.prompts - len(stored.problems))).noted("mix", (buffer, stored, left, rng))

    def end(batch: Unfinished, source: Origin) -> Unfinished:
        _, stored, left, rng = batch.notes["mix"]
        forest, source.memory["buffer"], metrics = buffers.mix(
            replay, batch.forest, stored, left, batch.snapshot.version, source.most, rng)
        return batch._replace(forest=forest).measured(metrics)

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        return marked(rollouts, batch.forest, batch.notes["mix"][0].uid, source)

    return Stage("mix", begin, end=end, view=view, provides=replay.provides, memory=memory_of(replay))


def memory_of(replay: Replay) -> StageMemory:
    """The buffer of a rule, from the first batch on."""
    def empty(source: Origin) -> Forest:
        return buffers.empty(replay, source.planted([], draw=0))

    def decode(stored, source: Origin) -> Forest:
        return buffers.decode(stored, empty(source), source.task.train, source.stream.partner.extract)

    return StageMemory("buffer", empty, decode)


def marked(rollouts: Rollouts, forest: Forest, stored: np.ndarray, source: Origin) -> Rollouts:
    """The rollouts of `forest` with `replayed`, for those with `stored` uids, and with `replay_weights` if it has weights."""
    ends = rows_of(forest, source)
    old = np.isin(forest.uid[ends], stored)  # versions do not tell: under a lag first batches share one
    rollouts = with_extras(rollouts, replayed=placed(forest, ends, old, rollouts.valid.shape))
    if "replay_weight" not in forest.facts:
        return rollouts
    weights = np.pad(forest.facts["replay_weight"], (0, len(rollouts.valid) - len(forest.problems)))
    return with_extras(rollouts, replay_weights=np.broadcast_to(weights[:, None, None], rollouts.mask.shape))


def generator(snapshot: Snapshot) -> np.random.Generator:
    """The random numbers of what is mixed into the batch of a snapshot."""
    seed = jax.random.fold_in(jax.random.fold_in(snapshot.key, _STREAM), snapshot.version)
    return np.random.default_rng(parallel.fetch(jax.random.key_data(seed)))


def rows_of(forest: Forest, source: Origin) -> np.ndarray:
    """i64[R], last nodes of the rows of a view: trajectories, or contexts where these have several."""
    return forest.ends if source.stream.contexts == 1 else forest.leaves

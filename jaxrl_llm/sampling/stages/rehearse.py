"""Draws stored rollouts that a step learns from after its fresh batch, in updates of their own."""
import numpy as np

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.replay import Replay, priorities
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, with_extras
from jaxrl_llm.sampling.stages.mix import generator, marked, memory_of

READS = priorities.READS


def rehearse(replay: Replay, prompts: int) -> Stage:
    """Batches of `memory["buffer"]` by a rule with `updates`, drawn once the fresh rollouts of the step are stored.

    The rollouts have `replayed` bool[P, G], which is True in these batches, and those of rules with weights `replay_weights`
    f32[P, G, T]. Rules that `renew` priorities get those of the last step before they draw; their groups are known to the
    learner by `group_uid` i32[P, 2]. Nothing is drawn for a batch without fresh rollouts. `prompts`: of a batch.
    """
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        if replay.renew is not None:
            uids = priorities.uids_of(batch.knobs["replayed_groups"])
            source.memory["buffer"] = buffers.renewed(
                source.memory["buffer"], uids[uids >= 0], batch.knobs["priorities"][uids >= 0])
        if not batch.forest.problems:
            return batch
        drawn = buffers.draw(replay, batch.forest, source.memory["buffer"], batch.snapshot.version, source.prompts, source.most,
                             generator(batch.snapshot))
        source.memory["buffer"] = drawn.buffer
        return batch._replace(replayed=drawn.batches).measured(drawn.metrics)

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        again = any(one is batch.forest for one in batch.replayed)
        rollouts = marked(rollouts, batch.forest, batch.forest.uid if again else np.zeros(0, np.int64), source)
        if replay.renew is None or not again:
            return rollouts
        uids = np.full(len(rollouts.valid), -1, np.int64)
        uids[:len(batch.forest.problems)] = buffers.group_uids(batch.forest)
        return with_extras(rollouts, group_uid=priorities.words(uids))

    carry = {} if replay.renew is None else {"priorities": priorities.carried(replay.updates * prompts)}
    return Stage("rehearse", end=end, view=view, reads=() if replay.renew is None else READS, provides=replay.provides,
                 memory=memory_of(replay), controllers=carry)

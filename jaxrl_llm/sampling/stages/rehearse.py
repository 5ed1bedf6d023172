"""Draws stored rollouts that a step learns from after its fresh batch, in updates of their own."""
import numpy as np

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.replay import Replay
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished
from jaxrl_llm.sampling.stages.mix import generator, marked, memory_of


def rehearse(replay: Replay) -> Stage:
    """Batches of `memory["buffer"]` by a rule with `updates`, drawn once the fresh rollouts of the step are stored.

    The rollouts have `replayed` bool[P, G], which is True in these batches, and those of rules with weights `replay_weights`
    f32[P, G, T].
    """
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        if not batch.forest.problems:
            return batch
        drawn = buffers.draw(replay, batch.forest, source.memory["buffer"], batch.snapshot.version, source.prompts, source.most,
                             generator(batch.snapshot))
        source.memory["buffer"] = drawn.buffer
        return batch._replace(replayed=drawn.batches).measured(drawn.metrics)

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        again = any(one is batch.forest for one in batch.replayed)
        return marked(rollouts, batch.forest, batch.forest.uid if again else np.zeros(0, np.int64), source)

    return Stage("rehearse", end=end, view=view, provides=replay.provides, memory=memory_of(replay))

"""Gives rollouts the baseline of rewards that controllers set."""
import numpy as np

from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, with_extras

READS = (Knob("reward_baseline", doc="f32[], the baseline of rewards of replayed rollouts"),)


def baseline() -> Stage:
    """`reward_baseline` f32[P], the same for all prompts."""
    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        if "reward_baseline" not in batch.knobs:
            return rollouts
        value = np.full(len(rollouts.valid), batch.knobs["reward_baseline"], np.float32)
        return with_extras(rollouts, reward_baseline=value)

    return Stage("baseline", view=view, reads=READS, provides=("reward_baseline",))

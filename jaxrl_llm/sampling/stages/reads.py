"""Shows what the writers of rollouts read in place of the prompt."""
import numpy as np

from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, placed, stage, with_extras
from jaxrl_llm.sampling.stages.mix import rows_of


@stage(provides=("read_tokens", "read_mask"))
def reads() -> Stage:
    """`read_tokens` i32[P, G, R], `read_mask` bool[P, G, R], the column `reads` of the policy's tokens; R is the longest text.

    The mask is False where all writers read the prompt. One rollout has one such text.
    """
    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        forest, ends = batch.forest, rows_of(batch.forest, source)
        assert forest.reads is not None
        length = source.stream.longest_read
        tokens, mask = np.zeros((len(ends), length), np.int32), np.zeros((len(ends), length), bool)
        for node, row in zip(*chains(forest, ends)):
            if (ids := forest.reads[node]) is not None:
                tokens[row, :len(ids)], mask[row, :len(ids)] = ids, True
        shape = (*rollouts.valid.shape, length)
        return with_extras(rollouts, read_tokens=placed(forest, ends, tokens, shape),
                           read_mask=placed(forest, ends, mask, shape))

    return Stage("reads", view=view, provides=("read_tokens", "read_mask"))

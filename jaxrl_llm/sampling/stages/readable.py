"""Says which texts of the policy cannot be read, for filters that leave them out."""
import numpy as np

from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import SAMPLED, Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, placed, stage, with_extras
from jaxrl_llm.sampling.stages.mix import rows_of

REPLACEMENT = "\ufffd"  # what tokenizers write for bytes that are no text


@stage(provides=("unreadable",))
def readable() -> Stage:
    """`unreadable` bool[P, G]: rollouts in which the policy wrote bytes that are no text, or the character that marks these."""
    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        forest, ends = batch.forest, rows_of(batch.forest, source)
        node, row = chains(forest, ends)
        marked = [own and REPLACEMENT in text for own, text in zip(np.isin(forest.role[node], SAMPLED), forest.texts[node])]
        found = np.bincount(row, np.array(marked, float), minlength=len(ends)) > 0
        return with_extras(rollouts, unreadable=placed(forest, ends, found, rollouts.valid.shape))

    return Stage("readable", view=view, provides=("unreadable",))

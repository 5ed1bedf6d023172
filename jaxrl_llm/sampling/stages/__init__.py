"""The stages of a batch of rollouts, in their order."""
from collections.abc import Sequence

from jaxrl_llm.sampling.stages.base import STAGES, Stage, StageMemory, Unfinished, stage
from jaxrl_llm.sampling.stages.baseline import baseline
from jaxrl_llm.sampling.stages.beside import beside
from jaxrl_llm.sampling.stages.choose import choose
from jaxrl_llm.sampling.stages.draw import draw
from jaxrl_llm.sampling.stages.exchange import after, before
from jaxrl_llm.sampling.stages.expect import expect
from jaxrl_llm.sampling.stages.greedy import greedy
from jaxrl_llm.sampling.stages.guide import guide
from jaxrl_llm.sampling.stages.hints import hints
from jaxrl_llm.sampling.stages.measure import measure
from jaxrl_llm.sampling.stages.mix import mix
from jaxrl_llm.sampling.stages.observed import observed
from jaxrl_llm.sampling.stages.readable import readable
from jaxrl_llm.sampling.stages.reads import reads
from jaxrl_llm.sampling.stages.reference import reference
from jaxrl_llm.sampling.stages.rehearse import rehearse
from jaxrl_llm.sampling.stages.sample import sample
from jaxrl_llm.sampling.stages.score import score
from jaxrl_llm.sampling.stages.shape import shape
from jaxrl_llm.sampling.stages.share import share
from jaxrl_llm.sampling.stages.writers import writers
from jaxrl_llm.tools import registry

__all__ = ["STAGES", "Stage", "StageMemory", "Unfinished", "after", "baseline", "before", "beside", "chain", "choose", "draw",
           "expect", "greedy", "guide", "hints", "measure", "mix", "observed", "readable", "reads", "reference", "rehearse",
           "replaced", "sample", "score", "shape", "share", "stage", "writers"]

registry.discover(__name__, __path__)


def chain(measures: Stage, expects: Sequence[Stage] = (), shapes: Sequence[Stage] = (), mixes: Sequence[Stage] = ()
          ) -> tuple[Stage, ...]:
    """The stages of a source, with `measures`, and with stages that predict, that shape rewards, and that mix batches."""
    grown = (reference(), draw(), *expects, sample(), score(), shape(), *shapes, measures)
    return (before(), *grown, choose(), baseline(), *mixes, writers(), hints(), after())


def replaced(stages: Sequence[Stage], new: Stage) -> tuple[Stage, ...]:
    """The stages with `new` in the place of the stage of its name."""
    return tuple(new if stage.name == new.name else stage for stage in stages)

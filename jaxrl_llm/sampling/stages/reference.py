"""Measures how often the policy solves reference problems, before a batch and beside it."""
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control import Fact
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, means, policy_tokens
from jaxrl_llm.sampling.stages.moments import grown
from jaxrl_llm.topologies import Plan, groups

READS = (
    Knob("reference_ids", ("K",), most="last", doc="i32[K], problems that get one group each before the batch, without "
         "training on them; ids below 0: none"),
)
FACTS = (Fact("reference_rates", "f32[K], shares of right rollouts of the `reference_ids`; NaN if not measured",
              ("knobs.reference_ids",)),)


def reference() -> Stage:
    """The fact `reference_rates` f32[K], shares of right rollouts of the problems whose ids controllers set."""
    return Stage("reference", begin=_begin, reads=READS)


def _begin(batch: Unfinished, source: Origin) -> Unfinished:
    if "reference_ids" not in batch.knobs:
        return batch
    ids, stream, tokens = np.asarray(batch.knobs["reference_ids"]), source.stream, 0
    rates, asked = np.full(len(ids), np.nan, np.float32), np.flatnonzero(ids >= 0)
    if len(asked):
        problems = [source.task.train[int(number)] for number in ids[asked]]
        encoded = parallel.first(stream.partner.encode(problems, stream.tokenizer, batch.timer))
        fits = [None if one is None or len(one) > stream.prompt_tokens else one for one in encoded]
        rows = [(problem, one) for problem, one in zip(problems, fits) if one is not None]
        planted = batch._replace(forest=source.planted(rows, draw=0), measuring=True,
                                 plan=Plan(acts=groups(range(len(rows)), stream.group)))
        forest = grown(planted, source).forest
        owner, right = forest.prompt[forest.ends], forest.solved[forest.ends]
        rates[asked[[one is not None for one in fits]]] = means(right, owner, len(rows))
        tokens = policy_tokens(forest)
    return batch._replace(beside=batch.beside + tokens).measured(counts={"reference_rates": rates})

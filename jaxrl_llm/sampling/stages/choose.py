"""Chooses the prompts of a complete batch to train on, as its topology says."""
from jaxrl_llm.data import forest as forests
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished


def choose() -> Stage:
    """The prompts to train on, and the topology's metrics of all of them; ValueError for made ones beyond a batch."""
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        chosen = forests.select(batch.forest, batch.topology.choose(batch.forest))
        if len(chosen.problems) > source.prompts and any(problem.id < 0 for problem in chosen.problems):
            raise ValueError(f"the topology chooses {len(chosen.problems)} prompts to train on, some of which it made, and a "
                             f"batch has {source.prompts}; let `choose` name fewer, or raise prompts.per_step")
        return batch.measured(batch.topology.metrics(batch.forest))._replace(forest=chosen)

    return Stage("choose", end=end)

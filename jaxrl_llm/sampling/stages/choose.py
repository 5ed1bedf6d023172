"""Chooses the prompts of a complete batch to train on, as its topology says."""
from jaxrl_llm.data import forest as forests
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished


def choose() -> Stage:
    """The prompts to train on, and the topology's metrics of all of them."""
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        chosen = forests.select(batch.forest, batch.topology.choose(batch.forest))
        return batch.measured(batch.topology.metrics(batch.forest))._replace(forest=chosen)

    return Stage("choose", end=end)

"""Predicts what to expect of problems before they are sampled."""
from jaxrl_llm import parallel
from jaxrl_llm.sampling import prior as prior_lib
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished


def expect(prior: prior_lib.Prior) -> Stage:
    """The facts that the prior reads of drawn problems, and its predictions `expected` f32[P]; NaN: unknown."""
    def grow(batch: Unfinished, source: Origin) -> Unfinished:
        if batch.drawn is None:
            return batch
        new, snapshot = batch.drawn, batch.snapshot
        rows = [(problem, new.prompt_ids(row).tolist()) for row, problem in enumerate(new.problems)]
        facts = prior.read(rows, snapshot.params, snapshot.lora)
        expected = parallel.fetch(prior_lib.predict(prior, snapshot.prior, facts))
        return batch._replace(drawn=new.with_facts({**facts, "expected": expected, **new.facts}))

    return Stage("expect", grow=grow, provides=("expected",), controllers={"prior": prior.controller})

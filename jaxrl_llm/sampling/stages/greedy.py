"""Samples one greedy trajectory of each drawn problem, for estimators that compare with its reward."""
import numpy as np

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, means, policy_tokens, stage, with_extras
from jaxrl_llm.sampling.stages.moments import grown
from jaxrl_llm.topologies import Begin, Plan

NAME = "greedy_rewards"


@stage(provides=(NAME,))
def greedy() -> Stage:
    """`greedy_rewards` f32[P], the reward of a trajectory at temperature 0; NaN where an environment lost it.

    Stages that shape rewards act on it as on others. It is in no forest of the batch, so that nothing is trained on it and no
    count or mean of rewards has it. Its tokens count as sampled ones; the metric `reward/greedy` is the mean over prompts,
    `reward/greedy_lost` the number of those whose trajectory was lost. The scan sampler computes a whole batch for
    them, as it has one shape; the slot engine a row for each.
    """
    def grow(batch: Unfinished, source: Origin) -> Unfinished:
        if (new := batch.drawn) is None:
            return batch
        acts = tuple(Begin(at, sampling={"temperature": 0.0}) for at in range(len(new.problems)))
        apart = grown(batch._replace(forest=new, drawn=None, plan=Plan(acts=acts), measuring=True), source).forest
        rewards = means(apart.rewards[apart.ends], apart.prompt[apart.ends], len(new.problems))
        return batch._replace(drawn=new.with_facts({**new.facts, NAME: rewards}), beside=batch.beside + policy_tokens(apart))

    def end(batch: Unfinished, source: Origin) -> Unfinished:
        found = batch.forest.facts.get(NAME, np.zeros(0))
        known = found[np.isfinite(found)]
        return batch.measured(({"reward/greedy": float(known.mean())} if len(known) else {}) | (
            {"reward/greedy_lost": float(len(found) - len(known))} if len(known) < len(found) else {}))

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        missing = len(rollouts.valid) - len(batch.forest.problems)
        return with_extras(rollouts, **{NAME: np.pad(batch.forest.facts[NAME], (0, missing))})

    return Stage("greedy", grow=grow, end=end, view=view, provides=(NAME,))

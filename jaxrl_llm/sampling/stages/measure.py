"""Measures facts of prompts that a plan requests, see `topologies.base.MEASURED`."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control import Fact
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, means, policy_tokens
from jaxrl_llm.sampling.stages.moments import grown
from jaxrl_llm.topologies import Plan
from jaxrl_llm.topologies.base import MEASURED, group_sizes

FACTS = tuple(Fact(name, f"{doc}; where a topology measures it, or a prior expects it", (f"facts.{name}",))
              for name, doc in MEASURED.items())


def measure(square_norms: Callable, successes: bool = False) -> Stage:
    """`gradient_norms`, from the first rollouts of prompts, or `expected`, from some that are not trained on.

    square_norms: `(params, lora, rollouts) -> f32[P, G]`, of the gradients of completions.
    successes: whether the expected number is the share of rollouts that solve their problem, in the place of the mean reward.
    """
    def grow(batch: Unfinished, source: Origin) -> Unfinished:
        if batch.plan.measure == "expected":
            apart = grown(batch._replace(plan=Plan(acts=batch.plan.acts), measuring=True), source)
            forest, tokens = with_expected(batch.forest, apart.forest, successes)
            return batch._replace(forest=forest, beside=batch.beside + tokens)
        if batch.plan.measure == "gradient_norms":
            return batch._replace(forest=_with_norms(batch, source, square_norms))
        return batch

    return Stage("measure", grow=grow)


def _with_norms(batch: Unfinished, source: Origin, square_norms: Callable) -> Forest:
    """The forest with the fact `gradient_norms` f32[P]."""
    forest, snapshot, group = batch.forest, batch.snapshot, source.stream.group
    rollouts = source.view(forest, snapshot.version, -(-int(group_sizes(forest).max()) // group) * group)
    right, texts = rollouts.correct & rollouts.valid, texts_of(rollouts)
    texts = parallel.put(texts.replace(filled=4), parallel.batch_sharding(source.stream.mesh))
    norms = np.sqrt(parallel.fetch(square_norms(snapshot.params, snapshot.lora, texts)))
    mean = np.sum(norms, axis=1, where=right) / np.maximum(right.sum(1), 1)
    return forest.with_facts({**forest.facts, "gradient_norms": mean[:len(forest.problems)].astype(np.float32)})


def with_expected(forest: Forest, grown: Forest, successes: bool = False) -> tuple[Forest, int]:
    """The forest with what is expected of problems where it was NaN, and the number of tokens that were sampled for it.

    This is the mean reward, or the share of `successes`, of the samples that `grown` has and the forest has not; 1/2 where an
    environment lost all of them.
    """
    first, known = len(forest.uid), forest.facts["expected"]
    ends = grown.ends[grown.ends >= first]
    values = grown.solved.astype(np.float32) if successes else grown.rewards
    seen = np.nan_to_num(means(values[ends], grown.prompt[ends], len(forest.problems)), nan=0.5)
    expected = np.where(np.isnan(known), seen, known).astype(np.float32)
    return forest.with_facts({**forest.facts, "expected": expected}), policy_tokens(grown) - policy_tokens(forest)

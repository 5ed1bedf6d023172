"""Fewer prompts than were sampled: prompts that a filter drops leave the batch (SPEAR, arXiv 2509.22601)."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.forest import Forest, select
from jaxrl_llm.topologies.base import Topology


def narrowed(inner: Topology, *, keep: Callable[[Forest], np.ndarray]) -> Topology:
    """`inner`, with training only on the prompts of its complete batch that pass `keep(forest) -> bool[P]`; see also `refill`.

    Metrics: `filter/kept`, the share of all sampled prompts that is trained on.
    """
    def choose(forest):
        chosen = inner.choose(forest).copy()
        if chosen.any():
            chosen[chosen] &= keep(select(forest, chosen))
        return chosen

    def metrics(forest):
        return inner.metrics(forest) | {"filter/kept": float(choose(forest).mean())}

    return inner._replace(choose=choose, metrics=metrics)

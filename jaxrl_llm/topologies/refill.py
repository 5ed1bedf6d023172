"""Further problems replace those that a filter drops (dynamic sampling, DAPO, arXiv 2503.14476)."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.forest import Forest, select
from jaxrl_llm.topologies.base import Plan, Topology


def refill(inner: Topology, prompts: int, *, keep: Callable[[Forest], np.ndarray], attempts: int) -> Topology:
    """Draws by `inner` until `prompts` of its problems pass `keep(forest) -> bool[P]`, in at most `attempts` draws.

    The first `prompts` problems that pass are trained on. Metrics: `filter/rounds`, draws; `filter/kept`, share that passed.
    """
    def passed(forest):
        kept = np.zeros(len(forest.problems), bool)
        for number in np.unique(forest.draw):
            drawn = forest.draw == number
            part = select(forest, drawn)
            chosen = inner.choose(part)
            if chosen.any():
                chosen[chosen] &= keep(select(part, chosen))
            kept[drawn] = chosen
        return kept

    def plan(forest):
        if not forest.problems:
            return inner.plan(forest)
        last = forest.draw == forest.draw[-1]
        wanted = inner.plan(select(forest, last))
        if len(wanted.rows):
            return wanted._replace(rows=np.flatnonzero(last)[wanted.rows])
        if wanted.measure:
            raise NotImplementedError(f"{wanted.measure} are measured of a whole batch, and a filter draws a batch in several "
                                      "parts; leave one of the two out")
        enough = passed(forest).sum() >= prompts or forest.draw[-1] + 1 >= attempts
        return Plan() if enough else inner.plan(select(forest, np.zeros(len(last), bool)))

    def choose(forest):
        kept = passed(forest)
        return kept & (np.cumsum(kept) <= prompts)

    def metrics(forest):
        return {"filter/rounds": float(forest.draw[-1] + 1), "filter/kept": float(passed(forest).mean())}

    return Topology(plan, choose, inner.max_groups, metrics)

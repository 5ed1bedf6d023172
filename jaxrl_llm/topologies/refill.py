"""Further problems replace those that a filter drops (dynamic sampling, DAPO, arXiv 2503.14476)."""
import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data.forest import Forest, select
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies.acts import Act, Stop
from jaxrl_llm.topologies.base import Plan, Topology, group_sizes


def refill(inner: Topology, prompts: int, *, keep: Callable[[Forest], np.ndarray], attempts: int) -> Topology:
    """Draws by `inner` until `prompts` of its problems pass `keep(forest) -> bool[P]`, in at most `attempts` draws.

    The first `prompts` problems that pass are trained on. Those that pass beyond them are discarded, as in DAPO's released
    code, and problems without a trajectory do not pass. Metrics: `filter/draws`; `filter/kept`, share that passed.
    """
    known: dict[bytes, np.ndarray] = {}  # what passed of each draw of this batch, by its samples

    def passed_of(part):
        chosen = inner.choose(part) & (group_sizes(part) > 0)
        if chosen.any():
            chosen[chosen] &= keep(select(part, chosen))
        return chosen

    def passed(forest):
        kept = np.zeros(len(forest.problems), bool)
        for number in np.unique(forest.draw):
            drawn = forest.draw == number
            own = drawn[forest.prompt]
            samples = forest.uid[own].tobytes() + forest.rewards[own].tobytes()
            if samples not in known:
                known[samples] = passed_of(select(forest, drawn))
            kept[drawn] = known[samples]
        return kept

    def plan(forest):
        if not forest.problems:
            known.clear()
            return inner.plan(forest)
        last = forest.draw == forest.draw[-1]
        wanted = inner.plan(select(forest, last))
        if wanted.measure and not wanted.acts:
            raise NotImplementedError(f"{wanted.measure} are measured of a whole batch, and a filter draws a batch in several "
                                      "parts; leave one of the two out")
        if wanted.acts:
            rows = np.flatnonzero(last)
            return wanted._replace(acts=tuple(_moved(act, rows) for act in wanted.acts))
        enough = passed(forest).sum() >= prompts or forest.draw[-1] + 1 >= attempts
        return Plan() if enough else inner.plan(select(forest, np.zeros(len(last), bool)))

    def choose(forest):
        kept = passed(forest)
        return kept & (np.cumsum(kept) <= prompts)

    def metrics(forest):
        filtered = {"filter/draws": float(forest.draw[-1] + 1), "filter/kept": float(passed(forest).mean())}
        return inner.metrics(forest) | filtered

    return inner._replace(plan=plan, choose=choose, metrics=metrics)


def _moved(act: Act, rows: np.ndarray) -> Act:
    """The act at the row of the whole forest; a problem that has no row yet joins the last draw."""
    if isinstance(act, Stop) or isinstance(act.at, Problem):
        return act
    return dataclasses.replace(act, at=int(rows[act.at]))

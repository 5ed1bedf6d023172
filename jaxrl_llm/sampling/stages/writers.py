"""Reports what trajectories earned in which a named expert, teacher or model wrote."""
import re

import numpy as np

from jaxrl_llm.data.forest import Forest, chains
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished


def writers() -> Stage:
    """Metrics of a batch for each writer that has a name in it, see `metrics`."""
    return Stage("writers", end=_measured)


def _measured(batch: Unfinished, source: Origin) -> Unfinished:
    return batch.measured(metrics(batch.forest)) if batch.forest.problems else batch


def metrics(forest: Forest) -> dict[str, float]:
    """`writer/NAME/share` of the trajectories in which it wrote, their mean `reward`, and its `tokens` in each of them."""
    assert forest.writer is not None
    found = dict[str, float]()
    named = sorted({*forest.writer.tolist()} - {""})
    if not named:
        return found
    node, row = chains(forest, forest.leaves)
    which, last = forest.finals
    ends = forest.leaves[last]
    for name in named:
        wrote = np.bincount(which[row], forest.length[node] * (forest.writer[node] == name), minlength=len(ends))
        if (own := wrote > 0).any():
            key = f"writer/{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}"
            found |= {f"{key}/share": float(own.mean()), f"{key}/reward": float(forest.rewards[ends][own].mean()),
                      f"{key}/tokens": float(wrote[own].mean())}
    return found

"""Metrics of a batch for each task of a run that has several."""
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest


def of_task(forest: Forest, task: int) -> Forest:
    """The prompts of one task, with all their nodes and facts."""
    return forests.select(forest, forest.task == task)


def metrics(forest: Forest, labels: Sequence[str]) -> dict[str, float]:
    """Prompts, mean reward, score, solved share and length, as `task/LABEL/...`, for the tasks that have prompts."""
    values = {}
    for task, label in enumerate(labels):
        part = of_task(forest, task)
        values[f"task/{label}/prompts"] = float(len(part.problems))
        if len(ends := part.ends):
            facts = forests.metrics(part)
            size = np.bincount(part.prompt[ends], minlength=len(part.problems))[part.prompt[ends]]
            values |= {f"task/{label}/reward": facts["reward/mean"],
                       f"task/{label}/score": float(np.average(part.components[ends, 0], weights=1 / size)),
                       f"task/{label}/solved": float(np.average(part.solved[ends], weights=1 / size)),
                       f"task/{label}/length": facts["completion/length"]}
    return values

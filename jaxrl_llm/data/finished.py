"""What a source of rollouts gives to a learner."""
import types
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Rollouts


class Finished(NamedTuple):
    """A batch to train on: `rollouts` (None: no prompt is left), a view of the `forest`, and `metrics`.

    `replayed`: batches of stored rollouts, each learned from in updates of its own after the `rollouts`.
    `counts`: the facts that are known without rollouts, see `control.Fact`: `tried` and `right` of all samples for it, and
    `reference_rates` where they were measured.
    """

    rollouts: Rollouts | None
    forest: Forest
    metrics: dict[str, float]
    counts: Mapping[str, np.ndarray] = types.MappingProxyType({})
    replayed: tuple[Rollouts, ...] = ()

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """The `counts`, and with rollouts the facts `[P, ...]` read of the prompts before sampling, with rows as they have."""
        if self.rollouts is None:
            return dict(self.counts)
        rows = len(self.rollouts.valid)
        return {name: np.concatenate([x, np.repeat(x[:1], rows - len(x), axis=0)]) if len(x) < rows else x
                for name, x in self.forest.facts.items()} | dict(self.counts)

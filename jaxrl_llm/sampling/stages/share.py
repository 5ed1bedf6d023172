"""Shares groups with other runs: a batch publishes its own, and groups of the pool take the places of some prompts."""
from collections.abc import Callable

import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling.sharing import Sharing
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, placed, roles_of, with_extras
from jaxrl_llm.sampling.stages.mix import generator, rows_of
from jaxrl_llm.topologies import Topology


def share(sharing: Sharing, fewer: Callable[[int], Topology]) -> Stage:
    """Groups of the pool; `fewer(prompts)` is the topology of the prompts that remain. The rollouts have `replayed`.

    Batches can be reproduced only if the pool is unchanged.
    """
    def begin(batch: Unfinished, source: Origin) -> Unfinished:
        foreign, metrics = sharing.take(source.stream, source.task.train, source.next_uid, generator(batch.snapshot))
        source.next_uid += len(foreign.ends)
        return batch._replace(topology=fewer(source.prompts - len(foreign.problems))).noted("share", (foreign, metrics))

    def end(batch: Unfinished, source: Origin) -> Unfinished:
        (foreign, metrics), fresh = batch.notes["share"], batch.forest
        sharing.publish(fresh, batch.snapshot.version)
        whole = forests.join([fresh.with_facts({}), foreign]) if foreign.problems else fresh
        return batch._replace(forest=whole).measured(metrics)

    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        forest, ends = batch.forest, rows_of(batch.forest, source)
        foreign = np.isin(forest.uid[ends], batch.notes["share"][0].uid)
        return with_extras(rollouts.replace(role=roles_of(rollouts)),
                           replayed=placed(forest, ends, foreign, rollouts.valid.shape))

    return Stage("share", begin, end=end, view=view, provides=("replayed",))

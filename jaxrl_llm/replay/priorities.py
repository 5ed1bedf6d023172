"""Priorities that a learner gives to stored groups, on their way to the buffer: a controller carries them to the next batch."""
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.control.base import Controller, Fact
from jaxrl_llm.control.knobs import Knob

READS = (Knob("replayed_groups", ("K", "words"), doc="i32[K, 2], groups that the last step replayed, see `replay.priorities`"),
         Knob("priorities", ("K",), 0, doc="f32[K], their priorities for the next draws from a replay buffer"))
FACTS = (Fact("replayed_groups", "i32[K, 2], groups that the step has replayed, under a rule that renews priorities",
              ("replay.renew",)),
         Fact("renewed_priorities", "f32[K], their new priorities", ("replay.renew",)))
NAMES = tuple(fact.name for fact in FACTS)


def carried(count: int) -> Controller:
    """`replayed_groups`, `priorities`: those of the last step, of up to `count` groups. Facts: the same, `FACTS`."""
    def observe(state, facts):
        return {"replayed_groups": facts["replayed_groups"], "priorities": facts["renewed_priorities"]}

    return Controller(lambda: {"replayed_groups": jnp.full((count, 2), -1, jnp.int32), "priorities": jnp.zeros(count)},
                      lambda state: state, observe, facts=NAMES, knobs=("replayed_groups", "priorities"))


def words(uids: np.ndarray) -> np.ndarray:
    """i32[K, 2], the lower and the upper half of uids i64[K], since devices have no integers of 64 bits."""
    uids = np.asarray(uids, np.int64)
    return np.stack([uids & 0xFFFFFFFF, uids >> 32], axis=-1).astype(np.uint32).view(np.int32)


def uids_of(halves: np.ndarray) -> np.ndarray:
    """i64[K] from their `words`; -1 where there is no group."""
    lower, upper = np.moveaxis(np.asarray(halves, np.int32), -1, 0)
    return (upper.astype(np.int64) << 32) | (lower.astype(np.int64) & 0xFFFFFFFF)


def filled(groups: list[np.ndarray], values: list[np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The facts of a step that replayed these groups i32[K, 2] with these new priorities, padded to `count` groups."""
    uids, priorities = np.full((count, 2), -1, np.int32), np.zeros(count, np.float32)
    if groups:
        found, value = np.concatenate(groups)[:count], np.concatenate(values)[:count]
        uids[:len(found)], priorities[:len(found)] = found, value
    return dict(zip(NAMES, (uids, priorities)))

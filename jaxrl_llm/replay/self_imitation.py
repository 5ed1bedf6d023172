"""The policy's rollouts that did better than their group, trained on once more (SPEAR, arXiv 2509.22601)."""
import numpy as np

from jaxrl_llm.control.spear_clip import admit
from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def self_imitation(*, batches: float = 1.0, fill: float = 1.5, max_age: int = 10) -> Replay:
    """Rollouts with `r > group mean` are stored; when the buffer is full, some are learned from once, and it begins again.

    With P prompts in a step, the buffer is full with more than `fill` times `batches P` groups. A random subset of them follows
    as an update of its own: the largest power of two up to `batches P`. Old log-probs are those of sampling. The numbers are
    the released code's, which counts 2048 rollouts, a batch of its runs on mathematics, in place of `batches P` groups.
    Rollouts older than `max_age` steps leave. Raises ValueError: no room for a group, or a buffer that is never full.
    """
    if not batches > 0 or not fill > 0:
        raise ValueError(f"batches={batches}, fill={fill}; give the groups that are replayed at once in batches, and how many "
                         "times as many are stored before that, both above 0")

    def better(rewards, valid):
        return np.asarray(admit(rewards - masked.group_mean(rewards, valid), valid))

    def groups(born, version, prompts, rng):
        most = max(int(batches * prompts), 1)
        return rng.permutation(len(born))[:2 ** (most.bit_length() - 1)] if len(born) > fill * most else np.zeros(0, np.int64)

    return Replay(better, groups=groups, max_age=max_age, updates=1, restarts=True, as_sampled=True)

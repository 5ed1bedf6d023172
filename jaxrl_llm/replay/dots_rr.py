"""Stored groups that disagreed replace a share of the batch (DOTS-RR, arXiv 2506.05316)."""
import numpy as np

from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def dots_rr(*, fresh: float = 0.5, capacity: int = 4096) -> Replay:
    """A share `1 - fresh` of a batch are random stored groups; of each problem its newest group is stored, if it disagrees.

    `capacity` rollouts are the paper's 512 groups of 8. Old log-probs are the current policy's, behaviour log-probs those of
    sampling. Raises ValueError: a share outside [0, 1].
    """
    if not 0 <= fresh <= 1:
        raise ValueError(f"fresh={fresh} is the share of a batch that is sampled; give 0 to 1")

    def disagree(rewards, valid):
        mean = np.asarray(masked.mean(rewards, valid, axis=1))
        spread = np.asarray(masked.max(rewards, valid, axis=1, initial=-np.inf)) > np.where(valid, rewards, np.inf).min(1)
        return valid & (spread & np.isfinite(mean))[:, None]

    def groups(born, version, prompts, rng):
        return rng.permutation(len(born))[:prompts - int(np.ceil(fresh * prompts))]

    return Replay(disagree, groups=groups, capacity=capacity, newest=True)

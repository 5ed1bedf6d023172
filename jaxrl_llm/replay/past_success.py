"""One of the last successes on a problem, inserted if all rollouts fail (ARPO, arXiv 2505.16282)."""
import numpy as np

from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def past_success(*, success: float = 0.1, per_prompt: int = 8, max_std: float = 0.05, max_mean: float = 0.2) -> Replay:
    """A random one of the last `per_prompt` rollouts with a reward above `success` replaces a failed group's first.

    A group fails if the population std of its rewards is below `max_std` and the mean below `max_mean`. Old log-probs
    are the current policy's, so that the first update has ratios of 1; this and the numbers follow the released code.
    """
    def gives_way(rewards, valid, rng):
        mean, std = masked.mean(rewards, valid, axis=1), masked.std(rewards, valid, axis=1, ddof=0)
        return np.where(np.asarray((std < max_std) & (mean < max_mean)) & valid.any(1), np.argmax(valid, axis=1), -1)

    return Replay(lambda rewards, valid: valid & (rewards > success), gives_way, per_prompt=per_prompt)

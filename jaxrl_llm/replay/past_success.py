"""One of the last successes on a problem, put in where all rollouts fail (ARPO, arXiv 2505.16282)."""
import numpy as np

from jaxrl_llm import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def past_success(*, success: float = 0.1, per_prompt: int = 8, max_std: float = 0.05, max_mean: float = 0.2) -> Replay:
    """A random one of the last `per_prompt` rollouts with a reward above `success` takes the place of a group's first.

    Groups fail where the population std of their rewards is below `max_std` and the mean below `max_mean`. Old log-probs
    are the policy's now, as in the released code, whose numbers these are: the first update sees ratios of 1.
    """
    def gives_way(rewards, valid, rng):
        mean, std = masked.mean(rewards, valid, axis=1), masked.std(rewards, valid, axis=1, ddof=0)
        return np.where(np.asarray((std < max_std) & (mean < max_mean)) & valid.any(1), np.argmax(valid, axis=1), -1)

    return Replay(lambda rewards, valid: valid & (rewards > success), gives_way, per_prompt=per_prompt)

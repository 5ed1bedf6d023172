"""The latest success on each problem, put back if all rollouts fail (RAPO, arXiv 2509.24107)."""
import numpy as np

from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def latest_success(*, success: float = 0.5) -> Replay:
    """A rollout with a reward above `success` is stored, and replaces a random one of a group without a success.

    Ratios of replayed rollouts use the log-probs of sampling. The paper leaves that open.
    """
    def gives_way(rewards, valid, rng):
        best = np.asarray(masked.max(rewards, valid, axis=1, initial=-np.inf))
        return np.where((best <= success) & valid.any(1), np.argmax(np.where(valid, rng.random(valid.shape), -1), axis=1), -1)

    return Replay(lambda rewards, valid: valid & (rewards > success), gives_way, per_prompt=1, as_sampled=True)

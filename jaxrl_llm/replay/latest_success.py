"""The latest success on each problem, put back if all rollouts fail (RAPO, arXiv 2509.24107; BEPA, arXiv 2601.05787)."""
import numpy as np

from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule
from jaxrl_llm.tools.registry import one_of


@rule
def latest_success(*, success: float = 0.5, place: str = "random") -> Replay:
    """A rollout with a reward above `success` is stored, and replaces a random or the last one of a group without a success.

    Ratios of replayed rollouts use the log-probs of sampling. RAPO's paper leaves that open, and BEPA's the place.
    """
    one_of("place", place, ("random", "last"))

    def gives_way(rewards, valid, rng):
        best = np.asarray(masked.max(rewards, valid, axis=1, initial=-np.inf))
        order = rng.random(valid.shape) if place == "random" else np.arange(valid.shape[1])
        return np.where((best <= success) & valid.any(1), np.argmax(np.where(valid, order, -1), axis=1), -1)

    return Replay(lambda rewards, valid: valid & (rewards > success), gives_way, per_prompt=1, as_sampled=True)

"""The policy's rollouts that did better than their group, trained on once more (SPEAR, arXiv 2509.22601)."""
import numpy as np

from jaxrl_llm.control.spear_clip import admit
from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


@rule
def self_imitation(*, share: float = 0.5, capacity: int = 2048, max_age: int = 10) -> Replay:
    """Rollouts with `r > group mean` are stored; random stored groups are up to `share` of a batch, each of them once.

    Old log-probs of replayed rollouts are those of sampling. `capacity` and `max_age` are the released code's, which replays
    in a separate update once the buffer is full; here fresh and replayed rollouts share a batch from the second step on.
    """
    def better(rewards, valid):
        return np.asarray(admit(rewards - masked.group_mean(rewards, valid), valid))

    return Replay(better, groups=lambda born, version, prompts, rng: rng.permutation(len(born))[:int(share * prompts)],
                  capacity=capacity, max_age=max_age, once=True, as_sampled=True)

"""Groups of recent policies replace some sampled groups (ReMix, arXiv 2507.06892)."""
import jax
import numpy as np

from jaxrl_llm.control.remix import policy_ages
from jaxrl_llm.replay.base import Replay, rule


@rule
def recent_groups(*, reuse: float = 0.4, max_age: int = 2, until: int | None = None, updates: int = 0,
                  critic_only: bool = False) -> Replay:
    """With probability `reuse` a group of a batch is one that was sampled 1 to `max_age` steps ago, see `policy_ages`.

    All rollouts are stored, and no group comes twice in a batch. Old log-probs are the current policy's, behaviour log-probs
    those of sampling. From step `until` on nothing is replayed; None: always. `updates`: number of batches of their own that
    such groups form after the fresh batch of a step; 0: they enter the batch. `critic_only`: the policy does not learn from
    these.
    """
    def groups(born, version, prompts, rng):
        if until is not None and version >= until:
            return np.zeros(0, np.int64)
        key, stored = jax.random.key(int(rng.integers(2**31))), version - int(born.min())
        ages = np.asarray(policy_ages(key, prompts, stored, reuse=reuse, max_age=max_age))
        order = rng.permutation(len(born))
        return np.concatenate([order[version - born[order] == age][:np.sum(ages == age)] for age in range(1, max_age + 1)])

    return Replay(lambda rewards, valid: valid, groups=groups, max_age=max_age, updates=updates, critic_only=critic_only)

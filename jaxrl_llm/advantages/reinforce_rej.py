"""Reinforce-Rej and RAFT++: plain rewards, without prompts that carry no signal (arXiv 2504.11343)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.control.dynamic_sampling import informative
from jaxrl_llm.tools import registry


@estimator
def reinforce_rej(*, variant: str = "signed") -> Estimator:
    """No baseline and no normalisation.

    `variant`:
      `signed`   A = 1 for a right answer (`Rollouts.correct`), -1 for a wrong one; 0 when all are right or all wrong
      `raw`      A = r, 0 when all are equal; with rewards 0 and 1 only right answers count, as in the released code
      `raft_pp`  A = 1 for a right answer, else 0 (RAFT++)
    A single rollout is kept. The paper does not say which reward scale it means; `signed` pushes wrong answers down.
    """
    registry.one_of("variant", variant, ("signed", "raw", "raft_pp"))

    def advantages(rollouts):
        right = rollouts.correct.astype(rollouts.rewards.dtype)
        if variant == "raft_pp":
            return right
        outcome, value = (rollouts.rewards,) * 2 if variant == "raw" else (right, 2 * right - 1)
        return jnp.where(informative(outcome, rollouts.valid)[:, None], value, 0)

    return stateless(advantages)

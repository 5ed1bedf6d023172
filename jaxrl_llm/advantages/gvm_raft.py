"""GVM-RAFT: right rollouts alone, and the same weight for every prompt however many it has (arXiv 2505.02391)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


@estimator
def gvm_raft() -> Estimator:
    """A = 1 / (right rollouts of the prompt * share of a rollout in the loss * prompts with a right one); 0 for wrong ones.

    Right as in `Rollouts.correct`. Under the aggregation `seq_mean_token_sum`, in which the share is 1 / (number of rollouts),
    the loss is the mean over prompts with a right rollout of the mean over their right rollouts of -log p. That is RAFT; with a
    clipped ratio, RAFT++. If nothing is right, A is 0.
    """
    def advantages(rollouts):
        right = rollouts.correct & rollouts.live
        per_prompt = masked.count(right, axis=1, keepdims=True)
        prompts, rows = masked.count(per_prompt > 0), masked.count(rollouts.live)
        return jnp.where(right, rows / jnp.maximum(prompts * per_prompt, 1), 0)

    return stateless(advantages)

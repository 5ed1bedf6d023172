"""Agentic AEPO's advantage: larger on tokens at which the policy is uncertain (arXiv 2510.14545)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def aepo_advantage(*, entropy_coef: float = 0.2, scope: str = "group", eps: float = 1e-6) -> Estimator:
    """`A_t = A (1 + entropy_coef (H_t - mean H) / (std H + eps))`, A the group z-score of the reward.

    Mean and sample std of the entropy are over all tokens of the prompt's group, or with `scope="batch"` of the batch.
    The sign changes only where the bracket is negative. Reconstructed: the value of `entropy_coef` and the scope;
    eps as in `grpo`.
    """
    registry.one_of("scope", scope, ("group", "batch"))
    axis = (1, 2) if scope == "group" else None

    def advantages(rollouts):
        H, mask = rollouts.entropies, rollouts.token_mask
        spread = masked.std(H, mask, axis, ddof=1, keepdims=True)
        z = (H - masked.mean(H, mask, axis, keepdims=True)) / (spread + eps)
        scores = group_z_score(rollouts.rewards, rollouts.valid, eps=eps)
        return scores[..., None] * (1 + entropy_coef * z)

    return stateless(advantages, needs=("rewards", "entropies"))

"""VCPO's baseline: the one that minimises the variance of the off-policy gradient (arXiv 2602.17616)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.ratios import sequence_ratio
from jaxrl_llm.tools import registry


@estimator
def vcpo(*, scope: str = "prompt", double_weight: bool = False, max_weight: float = 8.0, eps: float = 1e-8) -> Estimator:
    """`A_i = (r_i - b) / std`, `b = sum w^2 g r / (sum w^2 g)`, `w = exp(sum_t (old_logprobs - behavior_logprobs))`.

    g = `extras["score_sq_norms"]` f32[P, G], the squared norm of the gradient of the completion's log-prob. Sums are
    over the rollouts with tokens of the prompt, or of the `batch`; std is the prompt's population deviation, or 1 if that
    is not above eps. `double_weight` multiplies g once more by `min(w, max_weight)^2`, as the released trainer does.
    The sum is written around the mean, `b = mean + sum w^2 g (r - mean) / (sum w^2 g + eps)`, so that equal rewards
    give A = 0 exactly, and with vanishing weights b is the mean. `max_weight` and eps are the released trainer's.
    """
    registry.one_of("scope", scope, ("prompt", "batch"))
    axis = 1 if scope == "prompt" else (0, 1)

    def advantages(rollouts):
        rewards, live = rollouts.rewards, rollouts.live
        weight = sequence_ratio(rollouts.old_logprobs, rollouts.behavior_logprobs, rollouts.token_mask, length_normalised=False)
        influence = weight**2 * rollouts.extras["score_sq_norms"]
        if double_weight:
            influence = influence * jnp.minimum(weight, max_weight) ** 2
        mean = masked.mean(rewards, live, axis=axis, keepdims=True)
        total = masked.sum(influence, live, axis=axis, keepdims=True) + eps
        baseline = mean + masked.sum(influence * (rewards - mean), live, axis=axis, keepdims=True) / total
        deviation = masked.group_std(rewards, live, ddof=0)
        return (rewards - baseline) / jnp.where(deviation > eps, deviation, 1)

    return stateless(advantages, needs=("rewards", "old_logprobs", "behavior_logprobs", "score_sq_norms"))

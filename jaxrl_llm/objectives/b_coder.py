"""B-Coder: squared Bellman errors of Q-values from the policy's own log-probs, and imitation of reference programs."""
import jax.numpy as jnp

from jaxrl_llm.data.experts import expert_rollouts
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective


def _weights(rollouts: Rollouts):
    """`expert`: mean over the tokens of a reference program, then over these programs; 0 where there are none."""
    if "expert" not in rollouts.extras:
        return {}
    mask = rollouts.token_mask & expert_rollouts(rollouts)[..., None]
    count = masked.count(mask.any(-1)) * masked.count(mask, axis=2, keepdims=True)
    return {"expert": jnp.where(mask, 1 / jnp.maximum(count, 1), 0)}


@objective
def b_coder(*, alpha: float = 1.0, adv_coef: float = 0.1, ce_coef: float = 0.5) -> Objective:
    """`l = (y - Q)^2`, mean over tokens, then over programs, with `y - Q = A - alpha log p`; A from `advantages.b_coder`.

    The largest logit in Q comes from the start of the step (`extras["max_logprobs"]`): its value is the paper's, but it has no
    gradient. Rollouts of an expert (`extras["expert"]`), if there are any, add `adv_coef alpha |max log p - log p| -
    ce_coef log p`, mean over their tokens, then over the rollouts. The numbers are those of arXiv 2310.03173.
    """
    def token_loss(logprobs, rollouts, advantages):
        error = advantages - alpha * logprobs
        losses, metrics = {"loss": error**2}, {"td_error": jnp.abs(error)}
        if "expert" in rollouts.extras:
            behind = alpha * (rollouts.extras["max_logprobs"] - logprobs)
            losses["expert"] = adv_coef * jnp.abs(behind) - ce_coef * logprobs
        return losses, metrics

    return token_objective(token_loss, aggregation="seq_mean_token_mean", needs=("max_logprobs",), extra_weights=_weights)

"""KL-Cov: tokens whose log-prob and advantage covary most are penalised for leaving the old policy (arXiv 2505.22617)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.covariance import covariance, largest
from jaxrl_llm.objectives.ratios import log_ratio


@objective
def kl_cov(*, held_coef: float = 1.0, fraction: float = 2e-3, aggregation: str = "token_mean",
           max_len: int | None = None) -> Objective:
    """`l_t = -A rho`, plus `held_coef * |log rho|` on the `fraction` of tokens (at least one) of largest covariance.

    `cov_t = (A_t - mean A) (log p_t - mean log p)` over the mini-batch; ties go to the earlier token. There is no
    clipping. The penalty has gradient 0 at `rho = 1`: with a single update per batch only REINFORCE remains.
    The paper has `held_coef` 1 and `fraction` 2e-3 for 7B and 2e-4, also verl's default, for 32B parameters.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        change = log_ratio(logprobs, rollouts.old_logprobs, mask)
        cov = covariance(logprobs, advantages, mask)
        held = largest(cov, mask, mask, fraction)
        penalty = lax.stop_gradient(jnp.sign(change)) * change  # |change| with slope 0 at 0, where jnp.abs has 1
        loss = -advantages * jnp.exp(change) + jnp.where(held, held_coef * penalty, 0)
        return loss, {"held": held, "covariance": cov, "approx_kl": -change}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, whole_batch=True, reads_old=True)

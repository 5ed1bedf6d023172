"""SAPO: a sigmoid of each token's ratio in place of PPO's clip, by which gradients fade (arXiv 2511.20347)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.tools.ranges import POSITIVE


@objective(ranges={"tau_pos": POSITIVE, "tau_neg": POSITIVE})
def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05, aggregation: str = "seq_mean_token_mean",
         max_len: int | None = None) -> Objective:
    """`l_t = -A_t (4 / tau) sigmoid(tau (rho - 1))`, rho = exp(new - old log-prob); tau = `tau_pos` if A_t > 0, else `tau_neg`.

    The gradient is that of `-A_t rho` times `weight = 4 sigmoid (1 - sigmoid)`, which is 1 at rho = 1 and falls on both sides,
    the faster the larger tau is. On-policy the loss has the value `-2 A_t / tau`. Metrics: `weight`, `approx_kl` = mean of
    old - new log-prob, `max/ratio`. The temperatures, and the mean over tokens and then rollouts, are the paper's; verl and TRL
    have the same.
    """

    def token_loss(logprobs, rollouts, advantages):
        difference = log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        ratio, tau = jnp.exp(difference), jnp.where(advantages > 0, tau_pos, tau_neg)
        gate = jax.nn.sigmoid(tau * (ratio - 1))
        metrics = {"weight": 4 * gate * (1 - gate), "max/ratio": ratio, "approx_kl": -difference}
        return -advantages * gate * 4 / tau, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, reads_old=True)

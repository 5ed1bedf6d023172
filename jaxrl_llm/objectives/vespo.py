"""VESPO: a smooth kernel of the ratio of whole completions, which fades stale rollouts out (arXiv 2602.10693)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import LIMIT
from jaxrl_llm.tools.ranges import NOT_NEGATIVE


@objective(ranges=dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), NOT_NEGATIVE))
def vespo(*, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
          aggregation: str = "seq_mean_token_sum", max_len: int | None = None) -> Objective:
    """`l = -phi(W) A sum_t log p_t`, `phi(W) = W^k exp(lambda (1 - W))` detached; the value is not informative.

    W is the ratio of the whole completion to `behavior_logprobs`, not length-normalised, with a logarithm within +-20. k and
    lambda, which the paper calls c1 and c2, are `k_pos` and `lambda_pos` where the rollout's mean advantage is at least 0,
    else `k_neg` and `lambda_neg`. phi(1) = 1; its largest value is `(k / lambda)^k exp(lambda - k)`, at W = k / lambda.
    The numbers are the paper's, for all of its tasks. Its equation 20 sums over tokens; the released code and TRL have
    `token_mean`, clamp each token's log-ratio to +-20 too, and read the sign from the first token. Metrics: `weight` = phi,
    `max/ratio` = W, `approx_kl` = mean of `log q - log p`.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        change = lax.stop_gradient(logprobs) - rollouts.behavior_logprobs
        log_ratio = jnp.clip(masked.sum(change, mask, axis=-1), -LIMIT, LIMIT)
        good, ratio = masked.mean(advantages, mask, axis=-1) >= 0, jnp.exp(log_ratio)
        power, decay = jnp.where(good, k_pos, k_neg), jnp.where(good, lambda_pos, lambda_neg)
        weight = jnp.exp(power * log_ratio + decay * (1 - ratio))
        metrics = {"weight": weight, "max/ratio": ratio, "approx_kl": -change}
        return -weight[..., None] * advantages * logprobs, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")

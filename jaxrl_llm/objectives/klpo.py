"""KLPO: fit log-ratios to the sampler to rewards, with a correction by the KL at each token (arXiv 2610.08963)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.binary import complement
from jaxrl_llm.tools import registry

ROUTES = ("token", "sequence")
FLOOR = 1e-6  # of `1 - p`: below it float32 leaves noise of a log-prob, and the authors' code refuses p = 1


def binary_correction(logprobs: Array, sampler: Array) -> tuple[Array, Array]:
    """`(ell + k, w)`, elementwise, of `logprobs` = log p and `sampler` = log q: `ell = log(p / q)`, `w = (1 - q) / (1 - p)`,
    and `k = q log(q / p) + (1 - q) log w`, so that `ell + k = (1 - q) (ell + log w)` has the gradient `w d log p`.
    """
    rest = jnp.maximum(complement(sampler), FLOOR)
    weight = rest / jnp.maximum(complement(logprobs), FLOOR)
    return complement(sampler) * (logprobs - sampler + jnp.log(weight)), weight


@objective
def klpo(*, beta: float = 0.1, route: str = "token") -> Objective:
    """`l = -sum_t sg(h_t w_t) log p_t` per rollout, over all live rollouts alike; its value is not informative.

    Of a token with p now and q when it was sampled (`behavior_logprobs`): `ell = log(p / q)`, `k` its KL against all other
    tokens, and `w = (1 - q) / (1 - p)`, with which `d (log p + k) = w d log p`. A is the reward, without a baseline:
      `token`     h_t = A_t - beta ell_t
      `sequence`  h = A - beta sum_t (ell_t + k_t), A the rollout's mean; the gradient is that of h^2 / (2 beta)
    There is no ratio, no clip, no group and no division by the length. This is the paper's binary KL; its default estimates
    k by further tokens from q, whose log-probs no run records. `beta` is that of the authors' launchers, untuned.
    Metrics: `residual` = |h|, `correction` = w, `log_ratio` = sum_t ell_t, `sequence_kl` = sum_t k_t.
    """
    registry.one_of("route", route, ROUTES)

    def token_loss(logprobs, rollouts, advantages):
        mask, sampler = rollouts.token_mask, rollouts.behavior_logprobs
        current = lax.stop_gradient(logprobs)
        change, (centred, weight) = current - sampler, binary_correction(current, sampler)
        drift, total = (masked.sum(x, mask, axis=-1) for x in (change, centred))
        if route == "token":
            residual = advantages - beta * change
        else:
            residual = masked.to_tokens(masked.mean(advantages, mask, axis=-1) - beta * total, mask)
        metrics = {"residual": jnp.abs(residual), "correction": weight, "log_ratio": drift, "sequence_kl": total - drift}
        return -residual * weight * logprobs, metrics

    return token_objective(token_loss, aggregation="seq_mean_token_sum", needs=("behavior_logprobs",), unknown="old")

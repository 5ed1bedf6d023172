"""DPPO, divergence PPO: the trust region is a divergence of the distributions, not the ratio of a token (arXiv 2602.04879)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.objectives import binary
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import carried
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.ranges import BOUND

DIVERGENCES = {"tv": binary.total_variation, "kl": binary.kl_divergence}


@objective(ranges={"delta_low": BOUND, "delta_high": BOUND})
def dppo(*, divergence: str = "tv", delta_low: float = 0.15, delta_high: float = 0.15, max_ratio: float | None = None,
         aggregation: str = "seq_mean_token_sum", max_len: int | None = None) -> Objective:
    """`l_t = -M_t rho_t A_t`, `rho = p / q` against the policy that sampled, q = exp(`behavior_logprobs`).

    M = 0 where the update leads further away from q and D is too large: `A > 0, p > q, D > delta_high`, or `A < 0, p < q,
    D > delta_low`; else 1. Masked tokens stay in the denominator. D (`divergence`) looks at the sampled token against all
    others: `tv` is `|q - p|`, `kl` is `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, with 1e-8 beside both complements as
    in the released code. The weight in the gradient is `min(rho, max_ratio)`; None is no bound, as in the paper's equation
    12 and its stability analysis. Its larger runs have 5, verl and TRL 20. One delta of 0.15 for `tv` and 0.05 for `kl` are
    the paper's, its larger runs without adapters have 0.2 for `tv`. The paper warns against `old_logprobs` in the place of q.
    With `+ kl(0.002, estimator=k2, against=behavior)`, which is `0.001 (log rho_t)^2` on all tokens, masked or not, and deltas
    of 0.2 it is the default loss of prime-rl.
    Metrics: `clip_fraction` (tokens with M = 0), `divergence`, `approx_kl` = mean of `log q - log p`, `max/ratio`.
    """
    distance = DIVERGENCES[registry.one_of("divergence", divergence, tuple(DIVERGENCES))]
    bound = jnp.inf if max_ratio is None else max_ratio

    def token_loss(logprobs, rollouts, advantages):
        sampler, current = rollouts.behavior_logprobs, lax.stop_gradient(logprobs)
        change = lax.stop_gradient(log_ratio(logprobs, sampler, rollouts.token_mask))
        far = distance(current, sampler)
        leaves = ((advantages > 0) & (change > 0) & (far > delta_high)) | ((advantages < 0) & (change < 0) & (far > delta_low))
        weight = carried(jnp.minimum(jnp.exp(change), bound), logprobs)
        metrics = {"clip_fraction": leaves, "divergence": far, "approx_kl": -change, "max/ratio": jnp.exp(change)}
        return -jnp.where(leaves, 0, weight) * advantages, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")

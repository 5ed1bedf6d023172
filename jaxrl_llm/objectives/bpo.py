"""BPO: REINFORCE weighted by the ratio of the probabilities of all other tokens (arXiv 2609.15987)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.objectives import binary
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.trust_region import still_moving
from jaxrl_llm.tools.ranges import POSITIVE


@objective(ranges={"smoothing": POSITIVE})
def bpo(*, smoothing: float = 0.1, cap: float = 3.0, clip_low: float = 0.2, clip_high: float = 0.2,
        aggregation: str = "seq_mean_token_mean", max_len: int | None = None) -> Objective:
    """`l_t = -A_t M_t min(w_t, cap) log p_t`, `w_t = (1 + smoothing - mu_t) / (1 + smoothing - p_t)`, detached.

    p_t and mu_t are the probabilities of the sampled token under the policy and under the sampler. `M = 0` where
    A > 0 and w > 1 + clip_high, or A < 0 and w < 1 - clip_low; the cap applies after that. With `smoothing` 0 the gradient is
    that of `log p + KL(mu || p)`, the divergence over two outcomes, this token or another one: policy mirror descent summed
    over a completion, in which the values of all states but the first cancel. A rare token has a weight near 1. `smoothing`,
    `cap` and the aggregation are the paper's numbers; the clip range is TRL's (`BPOTrainer`), since the paper gives none.
    """
    def token_loss(logprobs, rollouts, advantages):
        sampler, policy = (smoothing + binary.complement(x) for x in (rollouts.behavior_logprobs, lax.stop_gradient(logprobs)))
        weight = sampler / policy
        moving = still_moving(weight, advantages, clip_low, clip_high)
        loss = -advantages * jnp.where(moving, jnp.minimum(weight, cap), 0) * logprobs
        return loss, {"masked_fraction": ~moving, "clip_fraction": weight > cap, "max/weight": weight}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")

"""Token entropies that can be maximised from sampled tokens alone."""
from jax import Array, lax

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.ratios import token_ratio


def sampled_entropy(logprobs: Array, rollouts: Rollouts) -> Array:
    """[P, G, T]: the value of `rollouts.entropies` with an unbiased estimate of the gradient of the entropy H.

    `grad H = -E_a[(log p(a) + H) grad log p(a)]` over all tokens a of the vocabulary; the sampled token stands for the
    expectation, weighted by its ratio to the old policy. H serves as the baseline of this score-function estimator,
    where a stale value costs variance, not bias. Exact gradients need the logits. With tokens drawn by top-k or top-p
    the gradient is that of the truncated distribution's entropy.
    """
    ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
    surrogate = -lax.stop_gradient(ratio * (logprobs + rollouts.entropies)) * logprobs
    return rollouts.entropies + (surrogate - lax.stop_gradient(surrogate))

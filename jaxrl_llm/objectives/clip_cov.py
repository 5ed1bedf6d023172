"""Clip-Cov: a few tokens whose log-prob and advantage covary strongly get no gradient (arXiv 2505.22617)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import draws
from jaxrl_llm.objectives.base import Metrics, Objective, objective, token_objective
from jaxrl_llm.objectives.covariance import covariance, largest
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


def clip_cov_loss(logprobs: Array, old_logprobs: Array | None, advantages: Array, mask: Array, key: Array, *, clip_low: float,
                  clip_high: float, fraction: float, cov_low: float, cov_high: float) -> tuple[Array, Metrics]:
    """The clipped surrogate [P, G, T] with 0 on randomly drawn tokens of large covariance, and metrics.

    Candidates are the unclipped tokens with `cov_low < covariance < cov_high`; `fraction` of all tokens of `mask`, at
    least one, are drawn from them without replacement.
    """
    loss, clipped = clipped_surrogate(token_ratio(logprobs, old_logprobs, mask), advantages, clip_low, clip_high)
    cov = covariance(logprobs, advantages, mask)
    candidates = mask & ~clipped & (cov > cov_low) & (cov < cov_high)
    drawn = largest(draws.uniform(key, mask.shape), candidates, mask, fraction)
    metrics = {"clip_fraction": clipped, "drawn": drawn, "candidates": candidates, "covariance": cov}
    return jnp.where(drawn, 0, loss), metrics


@objective
def clip_cov(*, clip_low: float = 1.0, clip_high: float = 1.0, fraction: float = 2e-4, cov_low: float = 1.0,
             cov_high: float = 5.0, seed: int = 0, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """PPO's clipped surrogate, but 0 on `fraction` of the tokens, drawn where `cov_low < cov_t < cov_high`.

    `cov_t = (A_t - mean A) (log p_t - mean log p)` over the tokens of the mini-batch. Drawn tokens stay in the
    denominator of the loss. The draw changes with every update; it is the same for the same `seed` and step. The
    numbers are those of the authors' code; its clip range of 1 almost disables PPO's clip.
    """

    def token_loss(logprobs, rollouts, advantages, step):
        return clip_cov_loss(
            logprobs, rollouts.old_logprobs, advantages, rollouts.token_mask,
            jax.random.fold_in(jax.random.key(seed), step),
            clip_low=clip_low, clip_high=clip_high, fraction=fraction, cov_low=cov_low, cov_high=cov_high)

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len,
        init=lambda: jnp.int32(0), advance=lambda step: step + 1, whole_batch=True, reads_old=True)

"""XRPO's advantage sharpening: rare correct answers teach more than common ones (arXiv 2510.06672)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def relative_likelihood(logprobs_PGT: Array, mask_PGT: Array, reference_PG: Array) -> Array:
    """`eta = exp(s - mean s)`, s the mean token log-prob, its mean over the rollouts of the group in `reference`."""
    mean_logprobs = masked.mean(logprobs_PGT, mask_PGT, axis=2)
    return jnp.exp(mean_logprobs - masked.group_mean(mean_logprobs, reference_PG))


def sharpen(advantages: Array, rare: Array, eta: Array, *, novelty_coef: float, novelty_cap: float) -> Array:
    """`A + min(max(novelty_coef (1 - eta), 0), novelty_cap A)` where `rare` and A > 0, A elsewhere; all [P, G]."""
    bonus = jnp.minimum(jnp.maximum(novelty_coef * (1 - eta), 0), novelty_cap * advantages)
    return advantages + jnp.where(rare & (advantages > 0), bonus, 0)


@estimator
def xrpo_advantage(*, novelty_coef: float = 2.5, novelty_cap: float = 0.5, baseline: str = "group",
                   eps: float = 1e-6) -> Estimator:
    """`A + min(max(novelty_coef (1 - eta), 0), novelty_cap A)` for correct rollouts, A the group z-score.

    `eta = exp(s - mean s)` measures how likely a rollout is relative to its group, s being its mean token log-prob under the
    policy that sampled it. Correct as in `Rollouts.correct`. Wrong and likelier-than-typical (eta >= 1) rollouts keep A, and
    the bonus is at most `novelty_cap` of A. `baseline="correct"` takes mean s over the correct rollouts only.
    Rollouts without tokens do not count in mean s. Reconstructed: the min/max form; `novelty_coef` and `novelty_cap` are the
    paper's numbers, eps as in `grpo`.
    """
    registry.one_of("baseline", baseline, ("group", "correct"))

    def advantages(rollouts):
        correct = rollouts.live & rollouts.correct
        reference = correct if baseline == "correct" else rollouts.live
        eta = relative_likelihood(rollouts.behavior_logprobs, rollouts.token_mask, reference)
        scores = group_z_score(rollouts.rewards, rollouts.valid, eps=eps)
        return sharpen(scores, correct, eta, novelty_coef=novelty_coef, novelty_cap=novelty_cap)

    return stateless(advantages, needs=("rewards", "behavior_logprobs"))

"""ACE: errors that became likelier than under the reference policy are punished harder (arXiv 2602.21420)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

MODULATIONS = {"softplus": jax.nn.softplus, "relu": jax.nn.relu}


def punish_confidence(advantages: Array, wrong: Array, shift: Array, *, alpha: float, modulation: str) -> Array:
    """`A * (1 + alpha * modulation(shift))` on wrong rollouts with A < 0, A elsewhere; all [P, G]."""
    factor = 1 + alpha * MODULATIONS[modulation](shift)
    return jnp.where(wrong & (advantages < 0), advantages * factor, advantages)


@estimator
def ace(*, alpha: float = 1.0, modulation: str = "softplus", norm: str = "sum", shift_clip: float | None = None,
        eps: float = 1e-6) -> Estimator:
    """`A' = A (1 + alpha softplus(c))` for wrong rollouts, A the group z-score, `c = sum_t (old - ref log-prob)`.

    Wrong: not `Rollouts.correct`. softplus(c) is near 0 for errors that the policy is unlearning and near c for errors it has
    become sure of; alpha = 0 is GRPO. `norm="mean"` divides c by the length and `shift_clip` bounds |c|: the sum grows with the
    length of the answer. Reconstructed: the form 1 + alpha * softplus and alpha; eps as in `grpo`.
    """
    registry.one_of("modulation", modulation, MODULATIONS)
    registry.one_of("norm", norm, ("sum", "mean"))
    reduce = masked.sum if norm == "sum" else masked.mean

    def advantages(rollouts):
        shift = reduce(rollouts.old_logprobs - rollouts.ref_logprobs, rollouts.token_mask, axis=2)
        if shift_clip is not None:
            shift = jnp.clip(shift, -shift_clip, shift_clip)
        scores = group_z_score(rollouts.rewards, rollouts.valid, eps=eps)
        return punish_confidence(scores, ~rollouts.correct, shift, alpha=alpha, modulation=modulation)

    return stateless(advantages, needs=("rewards", "old_logprobs", "ref_logprobs"))

"""Generalised on-policy distillation: a dense reward from a teacher, weighted against a base (arXiv 2602.12125)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked


def distillation_advantage(old: Array, teacher: Array, base: Array, weight: float) -> Array:
    """`-(old - base) + weight * (teacher - base)` of log-probs of the sampled tokens, any shape."""
    return base - old + weight * (teacher - base)


def teacher_gap(rollouts: Rollouts, teacher: Array) -> dict[str, Array]:
    """`teacher/gap`, the mean of log p_old - log p_teacher over trained tokens: an estimate of KL(student || teacher)."""
    gap = jnp.where(rollouts.token_mask, rollouts.old_logprobs - teacher, 0)
    return {"teacher/gap": masked.mean(gap, rollouts.token_mask)}


@estimator
def gopd(*, teacher_weight: float = 1.0) -> Estimator:
    """`A_t = -(log p_old - log p_base) + teacher_weight * (log p_teacher - log p_base)`, for each token separately.

    `extras["teacher_logprobs"]` and `extras["base_logprobs"]` f32[P, G, T] are log-probs of the student's own tokens
    under the teacher and under the base: the student's start, or the teacher before its own RL. Weight 1 is plain
    on-policy distillation (the base cancels), 0 pulls back to the base, above 1 goes beyond the teacher. No group is
    needed, rewards are not read. To go beyond the teacher the paper uses 1.25, see `exopd`.
    """

    def advantages(rollouts):
        extras = rollouts.extras
        return distillation_advantage(
            rollouts.old_logprobs, extras["teacher_logprobs"], extras["base_logprobs"], teacher_weight)

    made = stateless(advantages, needs=("old_logprobs", "teacher_logprobs", "base_logprobs"))
    return made._replace(metrics=lambda rollouts, advantages, state: teacher_gap(rollouts, rollouts.extras["teacher_logprobs"]))

"""ExOPD: on-policy distillation that extrapolates beyond its teachers, one teacher per domain (arXiv 2602.12125)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.gopd import distillation_advantage, teacher_gap


@estimator
def exopd(*, teacher_weight: float = 1.25) -> Estimator:
    """`A_t = (log p_teacher - log p_old) + (teacher_weight - 1) * (log p_teacher - log p_base)`, as `gopd`.

    `extras["teacher_logprobs"]` f32[P, G, T, E] holds the log-probs of the student's tokens under E teachers and
    `extras["teacher_id"]` i32[P] is the teacher of the prompt's domain; for one teacher, E = 1 and id 0.
    `extras["base_logprobs"]` f32[P, G, T] come from the start model of student and teachers, or, for a teacher larger
    than the student, from the teacher before its own RL. The weight 1.25 is the paper's.
    """

    def of_prompt(rollouts):
        teachers, chosen = rollouts.extras["teacher_logprobs"], rollouts.extras["teacher_id"]
        if teachers.ndim != 4:
            raise ValueError(f"extras['teacher_logprobs'] has shape {teachers.shape}, expected [P, G, T, teachers]")
        return jnp.take_along_axis(teachers, chosen[:, None, None, None], axis=3)[..., 0]

    def advantages(rollouts):
        base = rollouts.extras["base_logprobs"]
        return distillation_advantage(rollouts.old_logprobs, of_prompt(rollouts), base, teacher_weight)

    made = stateless(advantages, needs=("old_logprobs", "teacher_logprobs", "teacher_id", "base_logprobs"))
    return made._replace(metrics=lambda rollouts, advantages, state: teacher_gap(rollouts, of_prompt(rollouts)))

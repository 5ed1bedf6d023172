"""KEPO: GRPO plus distillation from a teacher on the rollouts whose reward passes a gate (arXiv 2602.00400)."""
import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio


def generalised_jsd(student_logits: Array, teacher_logits: Array, *, beta: float = 0.5) -> Array:
    """`beta KL(T || M) + (1 - beta) KL(S || M)`, `M = (1 - beta) S + beta T`, over the vocabulary: `[..., V] -> [...]`.

    The end points are the limits after division by beta (1 - beta): `beta=0` KL(T || S), `beta=1` KL(S || T).
    """
    student, teacher = jax.nn.log_softmax(student_logits), lax.stop_gradient(jax.nn.log_softmax(teacher_logits))

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    if beta == 0:
        return divergence(teacher, student)
    if beta == 1:
        return divergence(student, teacher)
    mixture = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    return beta * divergence(teacher, mixture) + (1 - beta) * divergence(student, mixture)


def sampled_jsd(logprobs: Array, teacher_logprobs: Array, mask: Array, beta: float) -> Array:
    """[P, G, T]: estimate of `generalised_jsd` from the sampled token a, with an unbiased gradient for a ~ S.

    The divergence is E_S[phi(u)], u = T(a) / S(a); its gradient is E_S[(phi - u phi') grad log S(a)], up to constants
    -(1 - beta) log(1 - beta + beta u) inside (0, 1), -u at 0 and -log u at 1.
    """
    log_u = log_ratio(teacher_logprobs, lax.stop_gradient(logprobs), mask)
    u = jnp.exp(log_u)
    if beta == 0:
        value, slope = u * log_u, -u
    elif beta == 1:
        value, slope = -log_u, -log_u
    else:
        log_m = jnp.log(1 - beta + beta * u)
        value, slope = beta * u * (log_u - log_m) - (1 - beta) * log_m, -(1 - beta) * log_m
    return value + slope * (logprobs - lax.stop_gradient(logprobs))


@objective
def kepo(*, gate: float | None = 1.0, kd_coef: float = 1.0, jsd_beta: float = 0.5) -> Objective:
    """`mean over rollouts of mean_t [-exp(log p - sg(log p)) A] + kd_coef * mean of gated JSD_t`.

    It assumes one update per batch: the ratio is 1. The distillation is on the policy's own tokens (mean over the tokens of
    all rollouts with r >= gate) and uses `extras["teacher_logprobs"]` f32[P, G, T], the teacher's log-probs of the sampled
    tokens: an estimate with unbiased gradient of the published full-vocabulary divergence (`generalised_jsd`).
    `gate=None` disables distillation; with rewards >= 0 the authors' gate of 0 passes all rollouts. `kd_coef` is
    their code's, `jsd_beta` is its library's default.
    """
    if not 0 <= jsd_beta <= 1:
        raise ValueError(f"jsd_beta={jsd_beta} must lie in [0, 1]; 0 is KL(teacher || student), 1 the reverse")

    def gated(rollouts):
        if gate is None:
            return {}
        passed = rollouts.valid & (rollouts.rewards >= gate)
        return {"gated": token_weights(rollouts.replace(valid=passed), "token_mean")}

    def token_loss(logprobs, rollouts, advantages):
        mask, metrics = rollouts.token_mask, {}
        loss = -token_ratio(logprobs, None, mask) * advantages
        if gate is None:
            return loss, metrics
        distillation = sampled_jsd(logprobs, rollouts.extras["teacher_logprobs"], mask, jsd_beta)
        metrics |= {"jsd": distillation, "gated_fraction": rollouts.rewards >= gate}
        return {"loss": loss, "gated": kd_coef * distillation}, metrics

    return token_objective(token_loss, aggregation="seq_mean_token_mean", extra_weights=gated,
                           needs=() if gate is None else ("rewards", "teacher_logprobs"))

"""PACS: binary cross-entropy of the verdict given the policy's own log-ratio as score (arXiv 2509.02522)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.tools import registry


def class_weights(labels_PG, valid_PG, weighting):
    """f32[P, G]: `balanced` n / (classes * size of the rollout's class) within the prompt, else 1 on the named label."""
    if weighting == "none":
        return jnp.ones_like(labels_PG)
    if weighting in ("only_positive", "only_negative"):
        return ((labels_PG > 0) == (weighting == "only_positive")).astype(labels_PG.dtype)
    alike = (labels_PG[:, :, None] == labels_PG[:, None, :]) & valid_PG[:, None, :]
    members = jnp.maximum(masked.count(alike, axis=2), 1)
    classes = masked.sum(1 / members, valid_PG, axis=1, keepdims=True)
    return masked.group_count(valid_PG) / (jnp.maximum(classes, 1) * members)


@objective
def pacs(*, beta: float = 1.0, score: str = "ratio", centre: str = "rloo", weighting: str = "balanced") -> Objective:
    """`mean of w [log(1 + exp(psi)) - y psi]` over rollouts, y the reward in [0, 1].

    `score`: `ratio` s = beta * sum_t (log p - old log p), or `logprob` s = beta * mean_t log p.
    `centre`: `rloo` psi = s - mean of the others, `grpo` psi = (s - mean) / (sample std + 1e-6), `naive` psi = s. The
    gradient flows through every s in psi, means and deviations too. `weighting`: `balanced` gives both labels of a
    prompt the same total, `only_positive`, `only_negative`, `none`. The mean divides by the number of rollouts, not by
    the sum of w. There is no clipping and no KL term; a group of one has a gradient only under `naive`. Rollouts
    without tokens are excluded. Advantages are not used. The defaults are those of the authors, who also use `beta=2`.
    """
    registry.one_of("score", score, ("ratio", "logprob"))
    registry.one_of("centre", centre, ("rloo", "grpo", "naive"))
    registry.one_of("weighting", weighting, ("balanced", "only_positive", "only_negative", "none"))

    def rollout_loss(logprobs, rollouts, advantages):
        mask, live, labels = rollouts.token_mask, rollouts.live, rollouts.rewards
        if score == "ratio":
            scores = beta * masked.sum(log_ratio(logprobs, rollouts.old_logprobs, mask), mask, axis=-1)
        else:
            scores = beta * masked.mean(logprobs, mask, axis=-1)
        psi = scores
        if centre == "rloo":
            psi = scores - masked.leave_one_out_mean(scores, live)
        elif centre == "grpo":
            psi = (scores - masked.group_mean(scores, live)) / (masked.group_std(scores, live, ddof=1) + 1e-6)
        weights = class_weights(labels, live, weighting)
        loss = weights * (jax.nn.softplus(psi) - labels * psi)
        return {"sequence": loss}, {"score": scores, "accuracy": (psi > 0) == (labels > 0.5)}

    return token_objective(rollout_loss, needs=("rewards",), reads_old=True, shares="sequence")

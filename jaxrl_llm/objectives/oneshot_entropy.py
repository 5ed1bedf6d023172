"""RL from a single example: the clipped loss, a small KL term and an entropy bonus (arXiv 2504.20571)."""
from jaxrl_llm.objectives.base import Objective, objective, token_objective, used
from jaxrl_llm.objectives.entropy import sampled_entropy
from jaxrl_llm.objectives.kl import token_kl
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def oneshot_entropy(*, policy_coef: float = 1.0, kl_coef: float = 1e-3, entropy_coef: float = 1e-3, clip_low: float = 0.2,
                    clip_high: float = 0.2, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = policy_coef * max(-A rho, -A clip(rho)) + kl_coef * k3_t - entropy_coef * H_t`.

    H has the value of the recorded `entropies` and, because the full logits are not available here, the gradient of the
    score-function estimate in `objectives.entropy`; the paper differentiates through all logits, which gives the
    expectation of this gradient. `policy_coef=0` is the control that trains on entropy alone, without rewards. The
    coefficients are those of the paper and its code.
    """

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        loss, metrics = policy_coef * loss, {"clip_fraction": clipped, "max/ratio": ratio}
        if used(entropy_coef):
            loss = loss - entropy_coef * sampled_entropy(logprobs, rollouts)
        if used(kl_coef):
            divergence = token_kl(logprobs, rollouts.ref_logprobs)
            loss, metrics["kl"] = loss + kl_coef * divergence, divergence
        return loss, metrics

    needs = (("entropies",) if used(entropy_coef) else ()) + (("ref_logprobs",) if used(kl_coef) else ())
    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=needs, reads_old=True)

"""GSPO: one ratio and one clip decision per completion (arXiv 2507.18071)."""
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio, sequence_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate

# The largest log of a sequence ratio: far outside every clip range, it only keeps exp finite.
LOG_LIMIT = 10.0


@objective
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Objective:
    """`l_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))`, `s_i = exp(mean_t (new - old log-prob))`.

    The loss is the mean of `l_i` over the live rollouts. `A_i` is the mean advantage of the rollout's tokens. The clip
    range, the paper's, is two to three orders of magnitude narrower than for tokens, because `s_i` is a geometric mean.
    """

    def sequence_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = sequence_ratio(logprobs, rollouts.old_logprobs, mask, limit=LOG_LIMIT)
        loss, clipped = clipped_surrogate(ratio, masked.mean(advantages, mask, axis=-1), clip_low, clip_high)
        drift = -log_ratio(logprobs, rollouts.old_logprobs, mask)
        return {"sequence": loss}, {"clip_fraction": clipped, "max/ratio": ratio, "approx_kl": drift}

    return token_objective(sequence_loss, reads_old=True, shares="sequence")

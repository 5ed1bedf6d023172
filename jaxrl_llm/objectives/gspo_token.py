"""GSPO-token: the ratio of the completion on every token, so that advantages may differ by token (arXiv 2507.18071)."""
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import carried
from jaxrl_llm.objectives.gspo import LOG_LIMIT
from jaxrl_llm.objectives.ratios import log_ratio, sequence_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def gspo_token(*, clip_low: float = 3e-4, clip_high: float = 4e-4, aggregation: str = "seq_mean_token_mean",
               max_len: int | None = None) -> Objective:
    """`l_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))`; `s_t` has the value of GSPO's `s_i`.

    Its gradient is `s_i` times the gradient of the token's own log-prob. The sign of each `A_t` decides which bound
    applies, so a completion can be clipped on some tokens only. With one advantage per completion this equals `gspo`.
    The clip range is the paper's. `aggregation=seq_mean_token_sum` multiplies the loss of a completion by its length, which is
    LUSPO (arXiv 2602.05261; its clip range is 0.002 and 0.0025, as TRL records): then a token of a long completion has the
    gradient of a token of a short completion, where GSPO divides it by the length.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        whole = sequence_ratio(logprobs, rollouts.old_logprobs, mask, limit=LOG_LIMIT)
        loss, clipped = clipped_surrogate(carried(whole[..., None], logprobs), advantages, clip_low, clip_high)
        drift = -log_ratio(logprobs, rollouts.old_logprobs, mask)
        return loss, {"clip_fraction": clipped, "max/ratio": whole, "approx_kl": drift}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, reads_old=True)

"""PPO's clipped surrogate per token (arXiv 1707.06347), with the options that GRPO, DAPO and their relatives share."""
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import check_dual_clip, clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped


@objective
def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None,
             aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`, `rho = exp(new - old log-prob)`.

    `dual_clip` c > 1 bounds the loss of negative advantages by `-A c` (arXiv 1912.09729). Metrics: `clip_fraction`,
    `clip_fraction_lower` (tokens at the dual bound), `approx_kl` = mean of old - new log-prob, `max/ratio`. Clip range and
    `token_mean` are TRL's defaults; the GRPO paper and tunix have `seq_mean_token_mean` and a term `kl(0.04)`, verl has
    `dual_clip=3`.
    """
    check_dual_clip(dual_clip)

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped, "max/ratio": ratio,
                   "approx_kl": -log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)}
        if dual_clip is not None:
            loss, metrics["clip_fraction_lower"] = dual_clipped(loss, advantages, dual_clip)
        return loss, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, reads_old=True)

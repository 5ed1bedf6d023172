"""PPO's clipped surrogate per token (arXiv 1707.06347), with the options that GRPO, DAPO and their relatives share."""
from jaxrl_llm.objectives import kl
from jaxrl_llm.objectives.base import Objective, objective, token_objective, used
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import check_dual_clip, clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped
from jaxrl_llm.tools import registry


@objective
def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, kl_coef: float = 0.0,
             kl_estimator: str = "k3", kl_ratio: bool = False, aggregation: str = "token_mean",
             max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) + kl_coef * KL_t`, `rho = exp(new - old log-prob)`.

    `dual_clip` c > 1 bounds the loss of negative advantages by `-A c` (arXiv 1912.09729). `kl_coef` needs the field
    `ref_logprobs`; with `kl_ratio` the loss has rho KL_t: under k3 its mean over tokens of the old policy is the KL of the new
    one, and so is its gradient, in every update of a batch (DeepSeek-V3.2, arXiv 2512.02556). Metrics: `clip_fraction`,
    `clip_fraction_lower` (tokens at the dual bound), `approx_kl` = mean of old - new log-prob, `kl`, `max/ratio`.
    Clip range, `kl_coef` and `token_mean` are TRL's defaults (its `use_bias_correction_kl` is `kl_ratio`); the GRPO paper and
    tunix have `kl_coef` 0.04 and `seq_mean_token_mean` (tunix with k1), verl has `dual_clip=3`.
    """
    registry.one_of("KL estimator", kl_estimator, kl.ESTIMATORS)
    check_dual_clip(dual_clip)

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped, "max/ratio": ratio,
                   "approx_kl": -log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)}
        if dual_clip is not None:
            loss, metrics["clip_fraction_lower"] = dual_clipped(loss, advantages, dual_clip)
        if used(kl_coef):
            divergence = kl.token_kl(logprobs, rollouts.ref_logprobs, kl_estimator)
            loss, metrics["kl"] = loss + kl_coef * (ratio * divergence if kl_ratio else divergence), divergence
        return loss, metrics

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=("ref_logprobs",) if used(kl_coef) else (), reads_old=True)

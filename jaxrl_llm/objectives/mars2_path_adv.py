"""MARS^2's loss: GSPO, corrected for the sampler token by token, with a KL term (arXiv 2604.14564)."""
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import bounded, carried, importance
from jaxrl_llm.objectives.gspo import LOG_LIMIT
from jaxrl_llm.objectives.ratios import sequence_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def mars2_path_adv(*, clip_low: float = 3e-4, clip_high: float = 4e-4, max_ratio: float = 2.0) -> Objective:
    """`l_t = w_t max(-A s_i, -A clip(s_i, 1 - clip_low, 1 + clip_high))`, mean over tokens, then over rollouts.

    `s_i = exp(mean_t (new - old log-prob))`, whose gradient on each token is s_i times that of its own log-prob, and
    `w_t = min(exp(old - behaviour log-prob), max_ratio)`, detached. With w = 1 this is `gspo`'s. `max_ratio` is
    the released code's, which has a term `kl(0.001)`; the clip range is that of `gspo`.
    """

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        whole = sequence_ratio(logprobs, rollouts.old_logprobs, mask, limit=LOG_LIMIT)
        advantage = masked.mean(advantages, mask, axis=-1)[..., None]
        loss, clipped = clipped_surrogate(carried(whole[..., None], logprobs), advantage, clip_low, clip_high)
        weight = bounded(importance(rollouts.old_logprobs, rollouts.behavior_logprobs, mask), "truncate", 0, max_ratio)
        return weight * loss, {"clip_fraction": clipped, "max/ratio": whole, "weight": weight}

    return token_objective(token_loss, aggregation="seq_mean_token_mean", needs=("old_logprobs", "behavior_logprobs"),
                           reads_old=True, unknown="old")

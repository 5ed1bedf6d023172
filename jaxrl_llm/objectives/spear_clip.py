"""SPEAR: self-imitation of replayed rollouts with growing weight and a cut by covariance (arXiv 2509.22601)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import check
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.clip_cov import clip_cov_loss
from jaxrl_llm.objectives.sil import NEEDS, scaled, worth_replaying


@objective
def spear_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, coef: float = 1.0, warmup: int = 200, max_age: int = 10,
               fraction: float = 0.02, cov_low: float = 1.0, cov_high: float = 40.0, seed: int = 0,
               aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """The update on replayed rollouts, `imitation_coef(step) * L_clip_cov`; the step is `extras["current_version"]` i32[P].

    Rollouts have the `old_logprobs` they were sampled with. They count only if they still reach `extras["reward_baseline"]`
    f32[P] and are at most `max_age` old (`extras["age"]` i32[P, G]). The loss is 0 on tokens that `clip_cov` draws. The numbers
    are the released code's for mathematics; there `warmup` is 100 to 300, and on ALFWorld the covariance band is 2 to 60.
    """

    def weights(rollouts):
        kept = rollouts.replace(valid=worth_replaying(check(rollouts, *NEEDS), max_age))
        return {"replayed": token_weights(kept, aggregation, max_len)}

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask & worth_replaying(rollouts, max_age)[..., None]
        key = jax.random.fold_in(jax.random.key(seed), jnp.max(rollouts.extras["current_version"]))
        loss, metrics = clip_cov_loss(logprobs, rollouts.old_logprobs, advantages, mask, key, clip_low=clip_low,
                                      clip_high=clip_high, fraction=fraction, cov_low=cov_low, cov_high=cov_high)
        kept = {"kept_fraction": worth_replaying(rollouts, max_age)}
        return {"replayed": scaled(loss, rollouts, coef, warmup)}, metrics | kept

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=NEEDS, extra_weights=weights,
                           whole_batch=True, reads_old=True, shares="replayed")

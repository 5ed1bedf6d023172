"""SPEAR: self-imitation of replayed rollouts with growing weight and a cut by covariance (arXiv 2509.22601)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, check
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.clip_cov import clip_cov_loss
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate

NEEDS = ("rewards", "old_logprobs", "age", "reward_baseline", "current_version")


def worth_replaying(rollouts: Rollouts, max_age: int) -> Array:
    """bool[P, G]: at most `max_age` steps old (`extras["age"]`), with a reward of at least `extras["reward_baseline"]`.

    A rollout that only equals the baseline has advantage 0: it has no gradient but counts in the mean.
    """
    reached = rollouts.rewards >= rollouts.extras["reward_baseline"][:, None]
    return rollouts.valid & reached & (rollouts.extras["age"] <= max_age)


def imitation_coef(step: Array, *, coef: float, warmup: int) -> Array:
    """`coef * (1 - cos(pi * min(step, warmup) / warmup)) / 2`: from 0 to `coef`; at once if `warmup` is 0."""
    progress = jnp.minimum(step / warmup, 1.0) if warmup else jnp.ones_like(step, float)
    return coef * (1 - jnp.cos(jnp.pi * progress)) / 2


@objective
def spear_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, coef: float = 1.0, warmup: int = 200, max_age: int = 10,
               fraction: float = 0.02, cov_low: float = 1.0, cov_high: float = 40.0, seed: int = 0,
               aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """The update on replayed rollouts, `imitation_coef(step) * L_clip_cov`; the step is `extras["current_version"]` i32[P].

    Rollouts have the `old_logprobs` they were sampled with. They count only if they still reach `extras["reward_baseline"]`
    f32[P] and are at most `max_age` old (`extras["age"]` i32[P, G]). The loss is 0 on tokens that `clip_cov` draws; with
    `fraction=0` it draws none, and the loss is the clipped surrogate. The numbers are the released code's for mathematics;
    there `warmup` is 100 to 300, and on ALFWorld the covariance band is 2 to 60.
    """

    def weights(rollouts):
        kept = rollouts.replace(valid=worth_replaying(check(rollouts, *NEEDS), max_age))
        return {"replayed": token_weights(kept, aggregation, max_len)}

    def of_batch(logprobs, rollouts, advantages, mask):
        if not fraction:
            ratio = token_ratio(logprobs, rollouts.old_logprobs, mask)
            loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
            return loss, {"clip_fraction": clipped & mask}
        key = jax.random.fold_in(jax.random.key(seed), jnp.max(rollouts.extras["current_version"]))
        return clip_cov_loss(logprobs, rollouts.old_logprobs, advantages, mask, key, clip_low=clip_low, clip_high=clip_high,
                             fraction=fraction, cov_low=cov_low, cov_high=cov_high)

    def token_loss(logprobs, rollouts, advantages):
        kept = worth_replaying(rollouts, max_age)
        loss, metrics = of_batch(logprobs, rollouts, advantages, rollouts.token_mask & kept[..., None])
        growing = imitation_coef(rollouts.extras["current_version"][:, None, None], coef=coef, warmup=warmup)
        return {"replayed": growing.astype(loss.dtype) * loss}, metrics | {"kept_fraction": kept}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=NEEDS, extra_weights=weights,
                           whole_batch=bool(fraction), reads_old=True, shares="replayed")

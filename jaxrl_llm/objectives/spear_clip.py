"""SPEAR: clipped loss on fresh rollouts plus self-imitation of replays with growing weight (arXiv 2509.22601)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import check
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.clip_cov import clip_cov_loss
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.sil import imitation_coef, worth_replaying
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped

NEEDS = ("rewards", "old_logprobs", "replayed", "reward_baseline", "age")


@objective
def spear_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 10.0, coef: float = 1.0, warmup: int = 200,
               max_age: int = 10, fraction: float = 0.02, cov_low: float = 1.0, cov_high: float = 40.0, seed: int = 0,
               aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """`L(fresh) + imitation_coef(step) * L_clip_cov(replayed)`, each aggregated over its own rollouts.

    `extras["replayed"]` bool[P, G] marks replayed rollouts, which have the `old_logprobs` they were sampled with. They
    count only if they still reach `extras["reward_baseline"]` f32[P] and are at most `max_age` old (`extras["age"]`
    i32[P, G]). Fresh tokens get the clipped surrogate, at most `-A * dual_clip` for A < 0, replayed tokens `clip_cov`
    with the same clip range. A step is one update. The numbers are the released code's for mathematics; there `warmup`
    is 100 to 300, and on ALFWorld the covariance band is 2 to 60.
    """

    def used(rollouts):
        return rollouts.extras["replayed"] & worth_replaying(rollouts, max_age)

    def weights(rollouts):
        check(rollouts, *NEEDS)
        parts = {"fresh": rollouts.valid & ~rollouts.extras["replayed"], "replayed": used(rollouts)}
        return {name: token_weights(rollouts.replace(valid=part), aggregation, max_len) for name, part in parts.items()}

    def token_loss(logprobs, rollouts, advantages, step):
        mask, old = rollouts.token_mask, rollouts.old_logprobs
        loss, clipped = clipped_surrogate(token_ratio(logprobs, old, mask), advantages, clip_low, clip_high)
        loss, lower = dual_clipped(loss, advantages, dual_clip)
        imitation, metrics = clip_cov_loss(
            logprobs, old, advantages, mask & used(rollouts)[..., None],
            jax.random.fold_in(jax.random.key(seed), step),
            clip_low=clip_low, clip_high=clip_high, fraction=fraction, cov_low=cov_low, cov_high=cov_high)
        scale = imitation_coef(step, coef=coef, warmup=warmup).astype(imitation.dtype)
        metrics = {f"replay/{name}": value for name, value in metrics.items()}
        metrics |= {"clip_fraction": clipped, "clip_fraction_lower": lower}
        return {"fresh": loss, "replayed": scale * imitation}, metrics

    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=NEEDS, extra_weights=weights,
        init=lambda: jnp.int32(0), advance=lambda step: step + 1, whole_batch=True, reads_old=True, shares="fresh")

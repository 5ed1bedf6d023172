"""Self-imitation: repeat better-than-expected actions (arXiv 1806.05635); for groups, SPEAR (arXiv 2509.22601)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import Rollouts, seen_returns
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


@objective
def sil(*, min_count: int = 64, max_nlp: float = 5.0) -> Objective:
    """`sum of w A min(-log p, max_nlp) / max(number of tokens with R > V, min_count)`, A = clip(R - V, 0, 1).

    R are the `rollouts.seen_returns`, V `extras["values"]`, w the replay buffer's importance weights
    `extras["replay_weights"]`, all f32[P, G, T]; A comes from the estimator `sil`. The bound on -log p limits only the value,
    not the gradient. The paper's entropy bonus is the term `entropy(0.01)`, which has the weights `w / max(...)` on tokens with
    R > V. The critic's loss is `value_loss`. Both numbers are those of the authors' code.
    """

    def shares(rollouts):
        better = rollouts.token_mask & (seen_returns(rollouts) > rollouts.extras["values"])
        share = rollouts.extras["replay_weights"] / jnp.maximum(masked.count(better), min_count)
        return {"better": jnp.where(better, share, 0)}

    def token_loss(logprobs, rollouts, advantages):
        bounded = lax.stop_gradient(jnp.minimum(-logprobs, max_nlp) + logprobs) - logprobs
        return {"better": advantages * bounded}, {"better_fraction": advantages > 0}

    return token_objective(token_loss, needs=("rewards", "values", "replay_weights"), extra_weights=shares, shares="better")


def value_loss(values: Array, returns: Array, replay_weights: Array, mask: Array, *, coef: float = 0.01,
               min_count: int = 64) -> Array:
    """Self-imitation's loss of the critic, differentiable in `values` [P, G, T]: it raises V towards R where R > V.

    `coef / 2 * sum of w V sg(clip(V - R, -1, 0)) / max(number of tokens with R > V, min_count)`.
    """
    count = masked.count(mask & (returns > values))
    gap = lax.stop_gradient(jnp.clip(values - returns, -1, 0))
    return coef / 2 * masked.sum(replay_weights * values * gap, mask) / jnp.maximum(count, min_count)


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
def spear(*, coef: float = 1.0, warmup: int = 200, max_age: int = 10, clip_low: float = 0.2,
          clip_high: float = 0.2) -> Objective:
    """The update on replayed rollouts of SPEAR without its covariance cut, which `spear_clip` has.

    `imitation_coef(step) * clipped surrogate`, mean over the tokens of the rollouts worth replaying; the step of a run is
    `extras["current_version"]` i32[P]. Rollouts are used if they reach `extras["reward_baseline"]` f32[P] and `extras["age"]`
    i32[P, G] is at most `max_age`; their `old_logprobs` were stored with them. `coef`, `warmup` and `max_age` are the released
    code's, where `warmup` is 100 to 300.
    """

    def shares(rollouts):
        return {"replay": token_weights(rollouts.replace(valid=worth_replaying(rollouts, max_age)), "token_mean")}

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        kept = worth_replaying(rollouts, max_age)
        metrics = {"kept_fraction": kept, "clip_fraction": clipped & kept[..., None]}
        return {"replay": scaled(loss, rollouts, coef, warmup)}, metrics

    return token_objective(token_loss, needs=NEEDS, extra_weights=shares, reads_old=True, shares="replay")


def scaled(loss: Array, rollouts: Rollouts, coef: float, warmup: int) -> Array:
    """Losses [P, G, T] times the `imitation_coef` of the step that learns from them."""
    step = rollouts.extras["current_version"][:, None, None]
    return imitation_coef(step, coef=coef, warmup=warmup).astype(loss.dtype) * loss
